"""Run a real data-parallel training with the course's loader and `fit`, and watch it.

    parent       checks the files, starts the ranks, shows what they report
    each rank    reads the files by itself, as on another machine it would have to

For comparison, we run the same program with one rank.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distlab.cost import SECONDS_AN_HOUR, cost_of
from distlab.curriculum.choose import Choice
from distlab.data.idx_sets import Files
from distlab.digests import digest
from distlab.monitor import Monitor, StepRecord
from distlab.runner import Cluster, Limits
from distlab.training.ddp_checkpoint import Checkpointing, RefusedError
from distlab.training.ddp_code import as_parts
from distlab.training.ddp_config import DdpConfig
from distlab.training.ddp_data import make_model
from distlab.training.ddp_rank import Monitored, train_as_rank
from distlab.training.digits_rank import Mode, in_a_row

PRELOADS = ("torch._dynamo", "distlab.training.ddp_rank")
"""Modules for `Cluster.warm`, which every rank would otherwise import by itself."""

# Rounding, in last digits: of a weight's largest change, and of the largest weight.
_OF_STEP = 1000.0
_OF_WEIGHT = 4.0

_GIB = 1 << 30
_LIMITS = Limits(
    seconds=7 * 24 * SECONDS_AN_HOUR,  # a deadlock is found without it
    memory_bytes=64 * _GIB,  # the data is the user's choice, and so is the machine
    journal_events=2_000,  # enough to see what a hang began with
)
_GPU_LIMITS = replace(_LIMITS, memory_bytes=4096 * _GIB)  # CUDA reserves addresses


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A rank and its data: its first samples, and how many it has in an epoch."""

    rank: int
    pid: int
    first: tuple[int, ...]
    count: int


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A rank's progress; `step` counts from 1 over all epochs, `loss` is its own.

    `accuracy` is from the previous epoch, None in the first.
    """

    rank: int
    epoch: int
    step: int
    loss: float
    accuracy: float | None


@dataclass(frozen=True, kw_only=True)
class EpochRow:
    """One epoch over all ranks; `loss` and `accuracy` are of held-out samples."""

    train_loss: float
    loss: float
    accuracy: float
    seconds: float
    throughput: float  # samples a second, of all ranks together


@dataclass(frozen=True, kw_only=True)
class DdpResult:
    """The result of a training; `communication` and `data_wait` are shares of time."""

    config: DdpConfig
    epochs: tuple[EpochRow, ...]
    accuracies: tuple[float, ...]  # as each rank's `evaluate` returned it at the end
    losses: tuple[tuple[float, ...], ...]  # as each rank's `fit` returned them
    weights: tuple[Tensor, ...]  # of each rank, in a row
    first_weights: Tensor  # rank 0's, after the first step
    seconds: float  # from the start of the ranks to their end
    communication: float
    data_wait: float
    step_bytes: float  # that one rank sends in a step
    num_steps: int
    shards: tuple[Shard, ...]

    @property
    def accuracy(self) -> float:
        """The share of held-out samples that the trained model classifies correctly."""
        return self.accuracies[0]

    @property
    def epoch_s(self) -> float:
        """The median duration of an epoch in seconds."""
        return statistics.median(row.seconds for row in self.epochs)

    @property
    def throughput(self) -> float:
        """Samples per second, over all ranks and epochs."""
        seconds = sum(row.seconds for row in self.epochs)
        return sum(row.throughput * row.seconds for row in self.epochs) / seconds

    @property
    def digests(self) -> tuple[str, ...]:
        """Each rank's weights as eight hex digits, which are equal if all bits are."""
        return tuple(digest(weights) for weights in self.weights)

    def cost(self, rate: float) -> float:
        """Return workers × hours × the price of one worker per hour."""
        return cost_of(self.config.world_size, self.seconds, rate)

    def failures(self) -> list[str]:
        """Return a sentence for each point on which the ranks disagree."""
        found = []
        num_ranks, distinct = len(self.digests), len(set(self.digests))
        if distinct > 1:
            found.append(
                f"REPLICAS DIFFER: {num_ranks} ranks hold {distinct} different sets of "
                "weights"
            )
        if not all(accuracy == self.accuracy for accuracy in self.accuracies):
            found.append("METRICS DIFFER: the ranks report different accuracies")
        if len({repr(losses) for losses in self.losses}) > 1:  # nan equals nan here
            found.append("LOSSES DIFFER: fit returned different losses on the ranks")
        return found


@dataclass(frozen=True, kw_only=True)
class Beside:
    """The result of n ranks, compared with one process on the same global batches.

    The differences are the largest between two weights, after the first step and at the
    end. `speedup` is above 1 if the ranks were faster.
    """

    first_difference: float
    difference: float
    speedup: float
    tolerance: float | None  # of the first difference; None where nothing can be said

    def failures(self) -> list[str]:
        """Say why it isn't the same training; empty if it is."""
        if self.tolerance is None or self.first_difference <= self.tolerance:
            return []
        return [
            f"after the first step the weights are up to {self.first_difference:.1e} "
            f"away from those of one process; rounding explains {self.tolerance:.0e}"
        ]


def train(
    cluster: Cluster,
    config: DdpConfig,
    files: Files | None,
    units: Mapping[str, Choice],
    *,
    on_shards: Callable[[list[Shard], int], None] | None = None,
    on_moment: Callable[[Moment], None] | None = None,
    on_epoch: Callable[[int, float], None] | None = None,
    on_log: Callable[[int, str], None] | None = None,
    monitor: Monitor | None = None,
    monitored: Monitored | None = None,
    checkpointing: Checkpointing | None = None,
    on_word: Callable[[str, str], None] | None = None,
    idle_s: float = math.inf,
    limits: Limits | None = None,
    mode: Mode = "averaged",
) -> DdpResult:
    """Train on `config.world_size` processes, and report progress to the callbacks.

    `on_shards` gets every rank's first samples and the number of steps in an epoch.
    `on_epoch` gets the number and the mean loss of each epoch that ends, and `on_log`
    gets what `fit` logs. `monitor` gets each validation and the records of the ranks'
    steps, made as `monitored` says. With a monitor, the ranks also note which call they
    are in, so that we can name a hang. `limits` are those of a training of any length
    and size unless you give others. As a control, `mode` may replace the trainer's
    step by a wrong one.

    With `checkpointing`, `units` must also have "fault_tolerance", and `on_word`
    receives "checkpoint" (where the training continues) and "warning". If a training
    continues from a checkpoint, the losses of earlier epochs are only in the rows of
    the epochs.

    Raises:
        RefusedError: the training can't continue from the checkpoint; one line says
            why.
        RunnerError: the ranks didn't finish, or did nothing for `idle_s` seconds; the
            message says why.
    """
    limits = limits or (_GPU_LIMITS if config.device == "cuda" else _LIMITS)
    ear = _Ear(
        config.world_size, on_shards, on_moment, on_epoch, on_log, monitor, on_word
    )
    cluster.warm(*PRELOADS)
    run = cluster.run(
        train_as_rank,
        config.world_size,
        asdict(config),
        {name: str(path.resolve()) for name, path in (files or {}).items()},
        {name: as_parts(unit) for name, unit in units.items()},
        asdict(monitored) if monitored else None,
        asdict(checkpointing) if checkpointing else None,
        mode,
        limits=replace(limits, idle_s=idle_s),
        on_report=ear.hear,
        seed=config.seed,
        backend=config.backend,
        # The reference does not deadlock. Others may, and their journals show it.
        journal=any(unit.source.side != "reference" for unit in units.values()),
        last_call=monitored is not None,
    )
    if ear.refused:
        raise RefusedError(ear.refused)
    values = run.require_finished().values
    epochs = [_row(i, values) for i in range(config.epochs)]
    train_s = sum(epoch["seconds"] for value in values for epoch in value["epochs"])
    return DdpResult(
        config=config,
        epochs=tuple(epochs),
        accuracies=tuple(value["metrics"][-1][1] for value in values),
        losses=tuple(value["losses"] for value in values),
        weights=tuple(value["weights"] for value in values),
        first_weights=values[0]["first_weights"],
        seconds=run.seconds,
        communication=_total(values, "communication_s") / train_s,
        data_wait=_total(values, "data_wait_s") / train_s,
        step_bytes=statistics.mean(v["sent_bytes"] / v["num_steps"] for v in values),
        num_steps=values[0]["num_steps"],
        shards=tuple(ear.shards[rank] for rank in sorted(ear.shards)),
    )


def train_alone(
    cluster: Cluster,
    config: DdpConfig,
    files: Files | None,
    units: Mapping[str, Choice],
    *,
    on_shards: Callable[[list[Shard], int], None] | None = None,
    on_moment: Callable[[Moment], None] | None = None,
    on_epoch: Callable[[int, float], None] | None = None,
) -> DdpResult:
    """Run the same program in one process, on the same global batches."""
    return train(
        cluster,
        replace(config, world_size=1),
        files,
        units,
        on_shards=on_shards,
        on_moment=on_moment,
        on_epoch=on_epoch,
    )


def compare(on_ranks: DdpResult, alone: DdpResult) -> Beside:
    """Compare the ranks with one process.

    We only judge the first step, because rounding grows after that: a weight that
    differs in its last digit changes the next gradient. Adam divides a gradient by its
    own size, so that a gradient of nearly zero can reverse a step. With Adam, we
    therefore don't judge anything.
    """
    (one,) = alone.weights
    return Beside(
        first_difference=_apart(on_ranks.first_weights, alone.first_weights),
        difference=max(_apart(held, one) for held in on_ranks.weights),
        speedup=alone.epoch_s / on_ranks.epoch_s,
        tolerance=_rounding(alone) if on_ranks.config.optimizer == "sgd" else None,
    )


def _rounding(alone: DdpResult) -> float:
    """Return how much another order of additions may change the first step."""
    before, after = in_a_row(make_model(alone.config)), alone.first_weights
    last_digit = float(torch.finfo(after.dtype).eps)
    change, largest = _apart(after, before), float(after.abs().max())
    return last_digit * (_OF_STEP * change + _OF_WEIGHT * largest)


def _apart(some: Tensor, others: Tensor) -> float:
    """Return the largest difference; a nan, which max() would skip, counts as inf."""
    return float((some - others).abs().nan_to_num(torch.inf).max())


def _row(index: int, values: list[dict[str, Any]]) -> EpochRow:
    loss, accuracy = values[0]["metrics"][index]
    parts = [value["epochs"][index] for value in values]
    num_samples = sum(part["samples"] for part in parts)
    seconds = max(part["seconds"] for part in parts)
    return EpochRow(
        train_loss=sum(part["loss_sum"] for part in parts) / max(1, num_samples),
        loss=loss,
        accuracy=accuracy,
        seconds=seconds,
        throughput=num_samples / seconds,
    )


def _total(values: list[dict[str, Any]], name: str) -> float:
    return float(sum(e[name] for value in values for e in value["epochs"]))


@dataclass
class _Ear:
    """Sorts the messages that the ranks report."""

    world_size: int
    on_shards: Callable[[list[Shard], int], None] | None
    on_moment: Callable[[Moment], None] | None
    on_epoch: Callable[[int, float], None] | None
    on_log: Callable[[int, str], None] | None
    monitor: Monitor | None
    on_word: Callable[[str, str], None] | None = None
    refused: str = ""

    def __post_init__(self) -> None:
        self.shards: dict[int, Shard] = {}
        self._ended: dict[int, list[dict[str, Any]]] = {}

    def hear(self, rank: int, report: dict[str, Any]) -> None:
        if "pid" in report:
            num_steps = report.pop("num_steps")
            self.shards[rank] = Shard(rank=rank, **report)
            if self.on_shards and len(self.shards) == self.world_size:
                ordered = [self.shards[r] for r in sorted(self.shards)]
                self.on_shards(ordered, num_steps)
        elif "step" in report and self.on_moment:
            self.on_moment(Moment(rank=rank, **report))
        elif "samples" in report:
            self._hear_end(report)
        elif "log" in report and self.on_log:
            self.on_log(rank, report["log"])
        elif "refused" in report:
            self.refused = report["refused"]
        elif self.on_word and ("checkpoint" in report or "warning" in report):
            self.on_word(*next(iter(report.items())))
        elif "record" in report and self.monitor:
            self.monitor.hear(StepRecord(**report["record"]))
        elif "validation" in report and self.monitor:
            step, loss, accuracy = report["validation"]
            figures = {"validation_loss": loss, "validation_accuracy": accuracy}
            self.monitor.figures(step, figures)

    def _hear_end(self, report: dict[str, Any]) -> None:
        parts = self._ended.setdefault(report["epoch"], [])
        parts.append(report)
        if self.on_epoch and len(parts) == self.world_size:
            num_samples = sum(part["samples"] for part in parts)
            loss = sum(part["loss_sum"] for part in parts) / max(1, num_samples)
            self.on_epoch(report["epoch"], loss)
