"""The result of a training: a row for each epoch, and the overall figures."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class EpochRow:
    """One epoch; losses are means over all samples of all ranks."""

    epoch: int
    loss: float
    learning_rate: float
    grad_norm: float
    seconds: float
    throughput: float
    """Samples per second of all ranks together, without the validation."""
    val_loss: float | None = None
    accuracy: float | None = None
    """Accuracy on the validation; None without one, or if outputs aren't class
    scores."""


@dataclass(frozen=True, kw_only=True)
class History:
    """The history of a training, the same on every rank."""

    backend: str
    num_gpus: int
    total_time: float
    """Seconds in the ranks, from the first step to the last."""
    epochs: tuple[EpochRow, ...]
    losses: tuple[float, ...] = field(repr=False, default=())
    """Mean loss of each step's global batch, before the step."""
    stopped_by: str = ""
    """Why it ended early: early_stopping, max_steps, max_cost or callback, else ""."""
    cost: float = 0.0
    single_throughput: float | None = None
    """Throughput of one process, if the caller measured it."""

    @property
    def best_accuracy(self) -> float | None:
        """Return the highest accuracy of any epoch."""
        known = [row.accuracy for row in self.epochs if row.accuracy is not None]
        return max(known, default=None)

    @property
    def throughput(self) -> float:
        """Return the samples per second over all epochs."""
        seconds = sum(row.seconds for row in self.epochs)
        samples = sum(row.throughput * row.seconds for row in self.epochs)
        return samples / seconds if seconds else 0.0

    @property
    def speedup(self) -> float | None:
        """Return the throughput relative to one process's; None if that is unknown."""
        return (
            self.throughput / self.single_throughput if self.single_throughput else None
        )
