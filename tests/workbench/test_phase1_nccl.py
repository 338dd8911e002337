"""Phase 1 over NCCL, where there are GPUs; and where not, what can be said of it.

Without a GPU the same scenarios run on a device that only pretends: what they hand to
the units, and the units to `comm`, must be on `comm.device`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.grading import TaskVerdict
from distlab.grading.grade import Grader
from distlab.runner import Cluster, Limits
from tests.workbench.elsewhere import Ranks, perform_elsewhere
from tests.workbench.judging import CURRICULUM, SEED, solution_of

# 1.16 asks for gloo, and the data loader's tasks have no comm.
TASKS = [
    task.id
    for unit in CURRICULUM.phase(1).units
    for task in unit.tasks
    if task.unit in ("collectives", "trainer") and task.id != "trainer.main"
]
PRELOADS = ("torch._dynamo", "tests.workbench.elsewhere")  # or each rank would do it
NUM_GPUS = torch.cuda.device_count()
RESERVED = 4096 << 30  # bytes: CUDA reserves addresses that it never uses


def judged(
    ranks: Any, task: str, world_size: int, code: str = "reference"
) -> TaskVerdict:
    worlds = (world_size,)
    grader = Grader(CURRICULUM, ranks, code=code, seed=SEED, worlds=worlds)
    return grader.grade([CURRICULUM.task(task)]).tasks[0]


@pytest.mark.gpu
@pytest.mark.skipif(not NUM_GPUS, reason="NCCL needs a GPU, and here is none")
@pytest.mark.parametrize("task", TASKS)
def test_the_reference_over_nccl(cluster: Cluster, task: str) -> None:
    limits = Limits(seconds=120, memory_bytes=RESERVED)
    ranks = Ranks(cluster, backend="nccl", limits=limits)
    for world_size in (1, 2, 4):  # more ranks than GPUs share them
        verdict = judged(ranks, task, world_size)
        assert verdict.status == "pass", verdict.message


@pytest.mark.parametrize("task", TASKS)
def test_all_that_is_shared_is_on_the_device_of_comm(
    cluster: Cluster, task: str
) -> None:
    cluster.warm(*PRELOADS)
    verdict = judged(Ranks(cluster, perform_elsewhere), task, 3)
    assert verdict.status == "pass", verdict.message


@pytest.mark.parametrize(
    ("old", "new", "task", "named"),
    [
        (
            "torch.tensor([num_samples], device=comm.device)",
            "torch.tensor([num_samples])",
            "trainer.gradient_weight",
            "comm.device",
        ),
        (
            "dtype=torch.float64, device=comm.device)",
            "dtype=torch.float64)",
            "trainer.evaluate",
            "same device",
        ),
        (
            "parameter.grad /= comm.world_size",
            "parameter.grad -= torch.ones(parameter.shape)",
            "trainer.average_gradients",
            "same device",
        ),
    ],
)
def test_what_is_on_the_cpu_is_refused_there(
    cluster: Cluster, tmp_path: Path, old: str, new: str, task: str, named: str
) -> None:
    text = solution_of("trainer")
    assert text.count(old) == 1
    path = tmp_path / "trainer.py"
    path.write_text(text.replace(old, new), encoding="utf-8")
    cluster.warm(*PRELOADS)
    verdict = judged(Ranks(cluster, perform_elsewhere), task, 2, str(path))
    assert verdict.status == "fail"
    assert named in verdict.message
