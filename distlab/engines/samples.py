"""Split samples over ranks so that every world size has the same global batches.

    order of the epoch      7 2 5 0 | 6 1 4 3 | 8 9         global batches of 4
    rank 0 of 2             7 2       6 1       8
    rank 1 of 2               5 0       4 3       9

A step's loss is the mean over its global batch, so N ranks with batches of b take the
same step as a single process with batches of N·b, including the last, smaller batch. A
rank with no samples left computes one with weight 0, because every rank must take part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils.data import Sampler

from distlab.seeds import small_seed


@dataclass(frozen=True)
class Microbatch:
    """The samples that one rank computes at once.

    `weight` multiplies the mean loss of `indices`, so that the mean over the ranks is
    the mean over the global batch.
    """

    indices: tuple[int, ...]
    weight: float
    ends_step: bool
    num_in_step: int
    """Number of samples in the whole step, on all ranks."""

    @property
    def num_samples(self) -> int:
        """Return the number of samples that count."""
        return len(self.indices) if self.weight else 0


def epoch_order(
    num_samples: int, *, shuffles: bool, seed: int, epoch: int
) -> list[int]:
    """Return the order of an epoch, which is the same on every rank."""
    if not shuffles:
        return list(range(num_samples))
    generator = torch.Generator().manual_seed(1_000_003 * small_seed(seed) + epoch)
    return torch.randperm(num_samples, generator=generator).tolist()


def epoch_plan(
    order: Sequence[int],
    *,
    rank: int,
    world_size: int,
    batch_size: int,
    num_microbatches: int = 1,
    drop_last: bool = False,
) -> list[Microbatch]:
    """Plan the microbatches of `rank` in an epoch; every rank has equally many."""
    size = world_size * batch_size * num_microbatches
    plan: list[Microbatch] = []
    for start in range(0, len(order), size):
        batch = order[start : start + size]
        if drop_last and len(batch) < size:
            break
        plan += _step_plan(batch, rank, world_size, batch_size)
    return plan


def _step_plan(
    batch: Sequence[int], rank: int, world_size: int, batch_size: int
) -> Iterator[Microbatch]:
    base, extra = divmod(len(batch), world_size)
    start = rank * base + min(rank, extra)
    mine = batch[start : start + base + (rank < extra)]
    longest = base + (extra > 0)
    for offset in range(0, longest, batch_size):
        indices = tuple(mine[offset : offset + batch_size])
        weight = len(indices) * world_size / len(batch)
        yield Microbatch(
            indices=indices or (batch[0],) * 2,  # batch norm rejects a single sample
            weight=weight,
            ends_step=offset + batch_size >= longest,
            num_in_step=len(batch),
        )


class PlannedBatches(Sampler[list[int]]):
    """Adapts a plan to a DataLoader's batch sampler."""

    def __init__(self, plan: Sequence[Microbatch]) -> None:
        self.plan = plan

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each microbatch."""
        return (list(one.indices) for one in self.plan)

    def __len__(self) -> int:
        """Return the number of microbatches."""
        return len(self.plan)
