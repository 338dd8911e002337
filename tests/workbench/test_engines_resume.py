"""What a training of the engines goes on from, and where it ends then."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from distlab.engines import DistributedConfig, EngineError
from distlab.engines.job import Job
from distlab.engines.loaders import read_loader
from distlab.engines.parallel import Parallel
from distlab.engines.worker import train
from tests.workbench.engine_probes import Net, fit, loader, sgd

pytestmark = pytest.mark.usefixtures("small_heap")

WAIT_S = 20.0  # for a rank that will not come: the test has failed then


@pytest.mark.parametrize("max_steps", [2, 3])
def test_a_checkpoint_that_has_all_steps_is_not_trained_on(
    max_steps: int, tmp_path: Path
) -> None:
    first = fit(checkpoint_dir=tmp_path)
    assert len(first.losses) == 3
    Net.seen.clear()
    again = fit(
        max_steps=max_steps,
        epochs=9,
        checkpoint_dir=tmp_path,
        resume_from_checkpoint=True,
    )
    assert Net.seen == []
    assert (again.stopped_by, again.losses) == ("max_steps", first.losses)
    assert again.epochs == first.epochs


class Meeting:
    """Sums tensors of several ranks, which are threads of this process."""

    def __init__(self, world_size: int) -> None:
        self.barrier = Barrier(world_size, timeout=WAIT_S)
        self.parts: dict[int, torch.Tensor] = {}

    def sum(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self.parts[rank] = tensor.clone()
        self.barrier.wait()
        total = torch.stack(list(self.parts.values())).sum(0)
        self.barrier.wait()
        return tensor.copy_(total)


class RankInThread(Parallel):
    """A rank of a `Meeting`; it keeps its gradients to itself."""

    device = torch.device("cpu")

    def __init__(self, config: DistributedConfig, rank: int, meeting: Meeting) -> None:
        super().__init__(config)
        self.rank, self.world_size = rank, meeting.barrier.parties
        self.meeting = meeting
        self.module = self.forward = Net()
        self.optimizer = sgd(self.module.parameters())

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.meeting.sum(self.rank, tensor)


def in_threads(configs: list[DistributedConfig]) -> list[Any]:
    """What each rank gives back or raises."""
    meeting = Meeting(len(configs))

    def run(rank: int) -> Any:
        config = configs[rank]
        job = Job(
            model=Net(),
            loss=torch.nn.functional.cross_entropy,
            optimizer=sgd,
            train=read_loader(loader(), None, "train_loader"),
            val=None,
            config=config,
            verbose=False,
        )
        try:
            return train(job, RankInThread(config, rank, meeting))
        except EngineError as error:
            return error

    with ThreadPoolExecutor(len(configs)) as threads:
        return list(threads.map(run, range(len(configs))))


@pytest.mark.parametrize("others", ["nothing", "an older one"])
def test_ranks_that_find_different_checkpoints_do_not_begin(
    others: str, tmp_path: Path
) -> None:
    folders = tmp_path / "node 0", tmp_path / "node 1"
    fit(epochs=2, checkpoint_dir=folders[0])
    if others == "an older one":
        fit(epochs=1, checkpoint_dir=folders[1])
    configs = [
        DistributedConfig(
            num_gpus=2, epochs=3, checkpoint_dir=one, resume_from_checkpoint=True
        )
        for one in folders
    ]
    said = "different checkpoints: checkpoint_dir must be a folder that all nodes share"
    for outcome in in_threads(configs):
        assert isinstance(outcome, EngineError)
        assert said in str(outcome)
