"""Train one transformer on 2 × 2 ranks in two layouts, and compare with one process.

It reads letters of `distlab/data/course.txt` and predicts the next one. We compare the
losses of every step in float64, because a single wrong gradient in one step changes all
losses after it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch

from distlab.curriculum.choose import Choice
from distlab.models.transformer import next_token_loss
from distlab.runner import Cluster, Limits
from distlab.training.ddp_code import as_parts
from distlab.training.mesh_rank import (
    Layout,
    MeshConfig,
    num_weights,
    train_as_rank,
)

__all__ = [
    "LAYOUTS",
    "PRELOADS",
    "TOLERANCE",
    "Layout",
    "MeshConfig",
    "MeshResult",
    "Place",
    "compare",
    "train_alone",
    "train_on_mesh",
]

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
PRELOADS = ("torch._dynamo", "distlab.training.mesh_rank")
"""Modules for `Cluster.warm`, which every rank would otherwise import by itself."""
WORLD_SIZE = 4
TOLERANCE = 1e-10  # between a loss of a rank and that of one process, in float64

_LIMITS = Limits(seconds=600)  # four ranks on a busy machine take long
OnStep = Callable[[int, float], None]
"""Receives the number of a step, counted from 0, and its loss."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's place: which half of each layer, and which stage or samples."""

    rank: int
    pid: int
    half: int
    group: int
    weights: int


@dataclass(frozen=True, kw_only=True)
class MeshResult:
    """The result of a training; `losses` and `step_bytes` have one entry per rank.

    `losses` are a rank's losses of all steps, and `step_bytes` is the number of bytes
    that it sends in a step. We count a library's all_reduce as a ring's.
    """

    losses: tuple[tuple[float, ...], ...]
    step_s: float
    step_bytes: tuple[float, ...] = ()
    places: tuple[Place, ...] = ()


def train_on_mesh(
    cluster: Cluster,
    config: MeshConfig,
    layout: Layout,
    units: dict[str, Choice],
    *,
    on_place: Callable[[Place], None] | None = None,
    on_step: OnStep | None = None,
) -> MeshResult:
    """Train on four processes, and report progress to the callbacks.

    Raises:
        RunnerError: the ranks didn't finish; the message says why.
    """
    places: dict[int, Place] = {}

    def on_report(rank: int, report: dict[str, Any]) -> None:
        if "pid" in report:
            places[rank] = Place(rank=rank, **report)
            if on_place:
                on_place(places[rank])
        elif on_step:
            on_step(report["step"], report["loss"])

    cluster.warm(*PRELOADS)
    run = cluster.run(
        train_as_rank,
        WORLD_SIZE,
        asdict(config),
        layout,
        {name: as_parts(unit) for name, unit in units.items()},
        limits=_LIMITS,
        on_report=on_report,
        seed=config.seed,
    ).require_finished()
    return MeshResult(
        losses=tuple(tuple(value["losses"]) for value in run.values),
        step_s=max(value["step_s"] for value in run.values),
        step_bytes=tuple(value["step_bytes"] for value in run.values),
        places=tuple(places[rank] for rank in sorted(places)),
    )


def train_alone(config: MeshConfig, *, on_step: OnStep | None = None) -> MeshResult:
    """Train in this process in plain PyTorch, using one thread like a rank."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train_plainly(config, on_step)
    finally:
        torch.set_num_threads(num_threads)


def _train_plainly(config: MeshConfig, on_step: OnStep | None) -> MeshResult:
    model = config.make_model()
    optimizer, losses = config.optimizer(model), []
    started = time.perf_counter()
    for number in range(config.num_steps):
        batch = config.batch(number)
        optimizer.zero_grad()
        loss = next_token_loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if on_step:
            on_step(number, losses[-1])
    step_s = (time.perf_counter() - started) / config.num_steps
    place = Place(rank=0, pid=os.getpid(), half=0, group=0, weights=num_weights(model))
    return MeshResult(losses=(tuple(losses),), step_s=step_s, places=(place,))


def compare(on_ranks: MeshResult, alone: MeshResult) -> float:
    """Return the largest difference between a rank's loss and that of one process."""
    theirs = torch.tensor(on_ranks.losses, dtype=torch.float64)
    ours = torch.tensor(alone.losses, dtype=torch.float64)
    return float((theirs - ours).abs().max())  # not a number if any is none
