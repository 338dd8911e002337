"""Which rank trains on which samples: the same global batches at every world size.

    order of the epoch      7 2 5 0 | 6 1 4 3 | 8 9         global batches of 4
    rank 0 of 2             7 2       6 1       8
    rank 1 of 2               5 0       4 3       9

A step's loss is the mean over its global batch, so N ranks with batches of b take the
step of a single process with batches of N·b, the last, smaller batch included. A rank
that has no sample left computes one with weight 0, because every rank must take part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from distlab.engines.expect import EngineError


@dataclass(frozen=True, kw_only=True)
class Loading:
    """What is kept of a caller's loader."""

    dataset: Any
    batch_size: int
    shuffles: bool
    drop_last: bool
    num_workers: int = 0
    collate_fn: Any = None
    worker_init_fn: Any = None
    pin_memory: bool = False

    @property
    def num_samples(self) -> int:
        """Of the data set."""
        return len(self.dataset)


@dataclass(frozen=True)
class Microbatch:
    """What one rank computes at once.

    `weight` multiplies the mean loss of `indices`; the mean over the ranks is then the
    mean over the global batch.
    """

    indices: tuple[int, ...]
    weight: float
    ends_step: bool
    num_in_step: int
    """Samples of the whole step, on all ranks."""

    @property
    def num_samples(self) -> int:
        """Samples that count."""
        return len(self.indices) if self.weight else 0


def read_loader(loader: Any, batch_size: int | None, what: str) -> Loading:
    """What of `loader` all ranks need; `batch_size` replaces its own.

    Raises:
        EngineError: it is no DataLoader, or its samples cannot be sharded.
    """
    if not isinstance(loader, DataLoader):
        raise EngineError(
            f"{what} is a {type(loader).__name__}, must be a torch DataLoader"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise EngineError(f"{what} has an IterableDataset, which has no indices")
    if loader.batch_sampler is not None and loader.batch_size is None:
        raise EngineError(
            f"{what} has a batch_sampler, which cannot be sharded: pass a loader with "
            "batch_size=…"
        )
    size = batch_size or loader.batch_size
    if size is None:
        raise EngineError(f"{what} has no batch_size: give batch_size=…")
    if not len(loader.dataset):  # type: ignore[arg-type]
        raise EngineError(f"{what} has no samples")
    return Loading(
        dataset=loader.dataset,
        batch_size=size,
        shuffles=_shuffles(loader.sampler, what),
        drop_last=bool(loader.drop_last),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        pin_memory=loader.pin_memory,
    )


def _shuffles(sampler: Any, what: str) -> bool:
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    if isinstance(sampler, SequentialSampler):
        return False
    if isinstance(sampler, RandomSampler) and not sampler.replacement:
        return True
    raise EngineError(
        f"{what} has a {type(sampler).__name__}, which cannot be sharded: pass a "
        "loader with shuffle=True or without a sampler"
    )


def epoch_order(
    num_samples: int, *, shuffles: bool, seed: int, epoch: int
) -> list[int]:
    """The order of an epoch; the same on every rank."""
    if not shuffles:
        return list(range(num_samples))
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
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
    """The microbatches of `rank` in an epoch; equally many on every rank."""
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
            indices=indices or (batch[0],),
            weight=weight,
            ends_step=offset + batch_size >= longest,
            num_in_step=len(batch),
        )


class PlannedBatches(Sampler[list[int]]):
    """A plan as what a DataLoader calls a batch sampler."""

    def __init__(self, plan: Sequence[Microbatch]) -> None:
        self.plan = plan

    def __iter__(self) -> Iterator[list[int]]:
        """The indices of each microbatch."""
        return (list(one.indices) for one in self.plan)

    def __len__(self) -> int:
        """The number of microbatches."""
        return len(self.plan)


def make_loader(loading: Loading, plan: Sequence[Microbatch]) -> DataLoader[Any]:
    """A loader of one rank for one epoch."""
    return DataLoader(
        loading.dataset,
        batch_sampler=PlannedBatches(plan),
        num_workers=loading.num_workers,
        collate_fn=loading.collate_fn,
        worker_init_fn=loading.worker_init_fn,
        pin_memory=loading.pin_memory,
    )
