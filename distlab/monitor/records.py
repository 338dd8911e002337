"""The record that a rank makes of its steps, and figures for all ranks together.

    rank 0   |data|  compute       |comm|      seconds = data + compute + comm
    rank 1   |data|  compute  |  comm   |      one record for every n steps

This module only has values: no clock, no communication and no files. `meter` makes the
records in a rank, and `monitor` passes them to the sinks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A record of one rank over the `num_steps` steps that end with `step`.

    The seconds are sums over these steps, read from a monotonic clock.
    `communication_s` is exposed communication: the time that the rank spent inside
    calls of its communicator without computing anything, which includes waiting for
    other ranks.
    """

    rank: int
    step: int  # counted from 1, over all epochs
    epoch: int  # counted from 1
    time_s: float  # Unix time at the end: for people, never for a duration
    num_steps: int
    seconds: float
    samples: int
    loss: float | None  # mean over this rank's samples; None where it had none
    data_wait_s: float
    communication_s: float
    learning_rate: float | None
    grad_norm: float | None  # where the optimizer began the last of these steps
    memory_bytes: int  # peak on the device so far; on a CPU of the whole process
    gpu_utilization: float | None  # share of time in which a kernel ran
    nonfinite_step: int | None = None  # first in which its own gradients had inf or nan
    checksum: int = 0  # of the weights after `step`, below 2^32; no buffers

    @property
    def step_s(self) -> float:
        """Seconds per step, as the mean over these steps."""
        return self.seconds / self.num_steps

    @property
    def data_wait_share(self) -> float:
        """Share of the time in which the rank waited for its next batch."""
        return self.data_wait_s / self.seconds if self.seconds else 0.0

    @property
    def communication_share(self) -> float:
        """Share of the time that was exposed communication."""
        return self.communication_s / self.seconds if self.seconds else 0.0

    @property
    def compute_share(self) -> float:
        """Share of the time that was neither of the two."""
        return max(0.0, 1.0 - self.data_wait_share - self.communication_share)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The numbers from which we compute model FLOPs utilization (MFU).

    `peak_flops` is how many operations the hardware of all ranks can do per second.
    PaLM (2204.02311, appendix B) defines MFU as the model's own operations, without
    those of recomputation, divided by that peak.
    """

    flops_per_sample: float  # forward and backward
    peak_flops: float


def combined(
    records: Sequence[StepRecord], work: Work | None = None
) -> dict[str, float]:
    """Return figures for all ranks, computed from their records of the same steps.

    The loss is the mean over all samples, so a rank counts by how many it had. The time
    of a step is that of the slowest rank. A figure that no rank knows is left out.

    Raises:
        ValueError: there are no records, or they come from different steps.
    """
    steps = {(record.step, record.num_steps) for record in records}
    if len(steps) != 1:
        raise ValueError(f"records of the same steps are combined, these are {steps}")
    seconds = max(record.seconds for record in records)
    num_samples = sum(record.samples for record in records)
    throughput = num_samples / seconds if seconds else 0.0
    figures = {
        "epoch": float(max(record.epoch for record in records)),
        "loss": _mean_loss(records),
        "learning_rate": records[0].learning_rate,
        "grad_norm": _largest([record.grad_norm for record in records]),
        "throughput": throughput,
        "step_s": max(record.step_s for record in records),
        "data_wait_share": _mean([record.data_wait_share for record in records]),
        "communication_share": _mean([r.communication_share for r in records]),
        "compute_share": _mean([record.compute_share for record in records]),
        "memory_bytes": float(max(record.memory_bytes for record in records)),
        "gpu_utilization": _mean([record.gpu_utilization for record in records]),
        "mfu": work.flops_per_sample * throughput / work.peak_flops if work else None,
    }
    return {name: value for name, value in figures.items() if value is not None}


def _mean_loss(records: Sequence[StepRecord]) -> float | None:
    parts = [(r.loss, r.samples) for r in records if r.loss is not None]
    num_samples = sum(samples for _, samples in parts)
    if not num_samples:
        return None
    return sum(loss * samples for loss, samples in parts) / num_samples


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _largest(values: Sequence[float | None]) -> float | None:
    """Return the largest value, or nan if there is one, which `max` would skip."""
    known = [value for value in values if value is not None]
    if any(math.isnan(value) for value in known):
        return math.nan
    return max(known, default=None)
