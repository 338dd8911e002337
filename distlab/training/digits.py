"""The course's standard experiment: train on the digits on n ranks and in one process.

We run the same training twice: on ranks, with the learner's or the reference's
`trainer`, and alone, in plain PyTorch. Then we compare weights. Accuracy wouldn't show
it if the ranks never communicate, or add where they should average. As controls, you
can run both of these mistakes as modes.

    shuffled order   0 1 2 3 4 5 6 7 8 …      one shuffle, the same on every rank
    rank 0 of 4      0       4       8 …      and so on: rank 1 has 1, 5, 9 …
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from distlab.curriculum import load_curriculum, naming_file, read_source
from distlab.curriculum.units import travelling
from distlab.data.digits import load_digits_split
from distlab.digests import digest
from distlab.models.mlp import make_mlp
from distlab.runner import Cluster, Limits
from distlab.training.digits_rank import (
    DigitsConfig,
    Mode,
    accuracy_of,
    in_a_row,
    shuffled,
    train_as_rank,
)
from distlab.training.proof import ACCURACY_FLOOR, Proof

__all__ = [
    "PRELOADS",
    "DigitsConfig",
    "DigitsResult",
    "Mode",
    "Moment",
    "Proof",
    "Shard",
    "compare",
    "train_alone",
    "train_on_ranks",
]

PRELOADS = ("torch._dynamo", "distlab.training.digits_rank")
"""Modules for `Cluster.warm`, which every rank would otherwise import by itself."""

_LIMITS = Limits(seconds=1800)  # many ranks on few cores take long, and are not stuck


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A rank and its data: its first places in the shuffled order."""

    rank: int
    pid: int
    first: tuple[int, ...]
    count: int


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A rank's progress; `accuracy` is from the previous epoch, None in the first."""

    epoch: int
    loss: float
    accuracy: float | None


@dataclass(frozen=True, kw_only=True)
class DigitsResult:
    """The result of a training; `weights` and `accuracies` have one entry per rank.

    `weights` are a rank's parameters in one vector. `communication` is the share of the
    training time that ranks spend in calls to others, and `step_bytes` is the number of
    bytes that one rank sends in a step. We count a library's all_reduce as a ring's.
    """

    config: DigitsConfig
    losses: tuple[float, ...]  # per epoch
    accuracies: tuple[float, ...]
    weights: tuple[Tensor, ...]
    epoch_s: float
    communication: float = 0.0
    step_bytes: float = 0.0
    shards: tuple[Shard, ...] = ()

    @property
    def num_steps(self) -> int:
        """The number of steps in the whole training."""
        count = len(load_digits_split().train_targets)
        return self.config.epochs * (count // self.config.global_batch_size)

    @property
    def accuracy(self) -> float:
        """The accuracy of rank 0's model on the held-out digits."""
        return self.accuracies[0]

    @property
    def digests(self) -> tuple[str, ...]:
        """Each rank's weights as eight hex digits, which are equal if all bits are."""
        return tuple(digest(weights) for weights in self.weights)


def train_on_ranks(
    cluster: Cluster,
    config: DigitsConfig,
    *,
    on_shard: Callable[[Shard], None] | None = None,
    on_moment: Callable[[Moment], None] | None = None,
) -> DigitsResult:
    """Train on `config.world_size` processes, and report progress to the callbacks.

    Raises:
        RunnerError: the ranks didn't finish; the message says why.
        SourceError: the trainer that `config.code` names can't be read.
    """
    shards: dict[int, Shard] = {}

    def on_report(rank: int, report: dict[str, Any]) -> None:
        if "pid" in report:
            shards[rank] = Shard(rank=rank, **report)
            if on_shard:
                on_shard(shards[rank])
        elif on_moment:
            on_moment(Moment(**report))

    cluster.warm(*PRELOADS)
    run = cluster.run(
        train_as_rank,
        config.world_size,
        asdict(config),
        _trainer_parts(config.code),
        limits=_LIMITS,
        on_report=on_report,
        seed=config.seed,
        # The reference does not deadlock. Others may, and their journals show it.
        journal=config.code != "reference",
    ).require_finished()
    values = run.values
    return DigitsResult(
        config=config,
        losses=values[0]["losses"],
        accuracies=tuple(value["accuracy"] for value in values),
        weights=tuple(value["weights"] for value in values),
        epoch_s=statistics.median(values[0]["epochs_s"]),
        communication=statistics.mean(value["communication"] for value in values),
        step_bytes=statistics.mean(value["step_bytes"] for value in values),
        shards=tuple(shards[rank] for rank in sorted(shards)),
    )


def train_alone(config: DigitsConfig) -> DigitsResult:
    """Run the same training in this process in plain PyTorch, without our trainer.

    It uses one thread, as each rank does, because a second one would only slow down so
    small a model.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _train_plainly(config)
    finally:
        torch.set_num_threads(num_threads)


def _train_plainly(config: DigitsConfig) -> DigitsResult:
    data = load_digits_split()
    model = make_mlp(seed=config.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
    size = config.global_batch_size
    losses, epochs_s = [], []
    for epoch in range(config.epochs):
        started, total = time.perf_counter(), 0.0
        order = shuffled(config.seed, epoch, len(data.train_targets))
        batches = [batch for batch in order.split(size) if len(batch) == size]
        for batch in batches:
            optimizer.zero_grad()
            loss = cross_entropy(
                model(data.train_inputs[batch]), data.train_targets[batch]
            )
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
        losses.append(total / len(batches))
        epochs_s.append(time.perf_counter() - started)
    return DigitsResult(
        config=config,
        losses=tuple(losses),
        accuracies=(accuracy_of(model, data),),
        weights=(in_a_row(model),),
        epoch_s=statistics.median(epochs_s),
    )


def compare(
    on_ranks: DigitsResult,
    alone: DigitsResult,
    *,
    accuracy_floor: float = ACCURACY_FLOOR,
) -> Proof:
    """Compare the weights of every rank with those of one process."""
    (one,) = alone.weights
    return Proof(
        difference=max(float((held - one).abs().max()) for held in on_ranks.weights),
        digests=on_ranks.digests,
        accuracy=min(on_ranks.accuracies),
        accuracy_floor=accuracy_floor,
    )


def _trainer_parts(code: str) -> dict[str, str]:
    """Read the trainer's text once, so that every rank runs the same code."""
    curriculum = load_curriculum()
    with naming_file():
        return travelling(read_source(curriculum, curriculum.units["trainer"], code))
