"""Checkpoints of `distlab.distributed`: bit-equal, at another size, refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlab.distributed as dist
from distlab.given.checkpoint import CheckpointError
from distlab.models.mlp import make_mlp
from distlab.runner import Cluster, RankContext
from tests.workbench.distributed_ranks import begin, ranks

NUM_STEPS, HALFWAY, SIZE = 8, 4, 8


class Trainer:
    """Dropout, momentum, a schedule and a shuffled sampler: each has state."""

    def __init__(self) -> None:
        torch.manual_seed(5 + dist.get_rank())
        mlp = nn.Sequential(nn.Dropout(0.3), make_mlp(seed=1))
        self.model = dist.DistributedDataParallel(mlp)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.sampler = dist.DistributedSampler(dataset_size=500, seed=2)
        generator = torch.Generator().manual_seed(3)
        self.data = torch.randn(500, 64, dtype=torch.float64, generator=generator)

    def steps(self, count: int) -> None:
        indices = iter(self.sampler)
        for _ in range(count):
            batch = self.data[[next(indices) for _ in range(SIZE)]]
            self.optimizer.zero_grad()
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()

    @property
    def arguments(self) -> tuple[Any, Any]:
        return self.model, self.optimizer

    @property
    def parts(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "sampler": self.sampler}

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def unbroken_and_saved(context: RankContext, folder: str) -> Tensor:
    begin(context)
    trainer = Trainer()
    trainer.steps(HALFWAY)
    dist.save_checkpoint(folder, HALFWAY, *trainer.arguments, **trainer.parts)
    trainer.steps(NUM_STEPS - HALFWAY)
    return trainer.weights()


def resumed(context: RankContext, folder: str, leave_out: str = "") -> Tensor:
    begin(context)
    trainer = Trainer()
    torch.manual_seed(99)
    parts = {name: part for name, part in trainer.parts.items() if name != leave_out}
    step = dist.load_checkpoint(folder, *trainer.arguments, **parts)
    assert step == HALFWAY
    trainer.steps(NUM_STEPS - step)
    return trainer.weights()


def test_a_resume_is_bit_equal_and_each_part_counts(
    cluster: Cluster, tmp_path: Path
) -> None:
    unbroken = ranks(cluster, unbroken_and_saved, 2, str(tmp_path))
    for leave_out in ("", "scheduler", "sampler"):
        found = ranks(cluster, resumed, 2, str(tmp_path), leave_out)
        same = [torch.equal(a, b) for a, b in zip(unbroken, found, strict=True)]
        assert same == [not leave_out] * 2, leave_out


def at_another_size(context: RankContext, folder: str) -> list[Any]:
    begin(context)
    trainer = Trainer()
    parts: dict[str, Any] = {"scheduler": trainer.scheduler}
    step = dist.load_checkpoint(folder, *trainer.arguments, **parts)
    with pytest.raises(ValueError, match=r"num_replicas\b.* 3\b.* 2\b"):
        dist.load_checkpoint(folder, *trainer.arguments, **trainer.parts)
    scaler: Any = trainer.scheduler
    with pytest.raises(ValueError, match="'scaler'"):
        dist.load_checkpoint(folder, *trainer.arguments, scaler=scaler)
    with pytest.raises(ValueError, match="another model"):
        dist.load_checkpoint(folder, nn.Linear(2, 2), trainer.optimizer)
    return [step, trainer.weights()]


def test_another_number_of_ranks_loads_what_it_can(
    cluster: Cluster, tmp_path: Path
) -> None:
    ranks(cluster, unbroken_and_saved, 2, str(tmp_path))
    found = ranks(cluster, at_another_size, 3, str(tmp_path))
    assert [step for step, _ in found] == [HALFWAY] * 3
    assert all(torch.equal(found[0][1], weights) for _, weights in found)


def refusals(context: RankContext, folder: str) -> list[str]:
    rank, _ = begin(context)
    trainer = Trainer()
    taken: Any = {"random": trainer.scheduler}
    sharded: Any = dist.TensorParallel.__new__(dist.TensorParallel)
    place = f"{folder}/{'file' if rank else 'folder'}"  # no folder on rank 1
    said = []
    for arguments, parts, at in [
        ((trainer.model, trainer.optimizer), {}, place),
        ((trainer.model, trainer.optimizer), taken, folder),
        ((sharded, trainer.optimizer), {}, folder),
    ]:
        with pytest.raises((CheckpointError, ValueError)) as refusal:
            dist.save_checkpoint(at, 1, *arguments, **parts)
        said.append(str(refusal.value))
    return said


def test_what_cannot_be_saved_is_refused_on_every_rank(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    for said in ranks(cluster, refusals, 2, str(tmp_path)):
        assert re.match(r"step 1 .*: rank 1: .*file", said[0])
        assert said[1].startswith("'random' ")
        assert "TensorParallel" in said[2]
        assert not any("\n" in line for line in said)
