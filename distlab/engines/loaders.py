"""Rebuild the caller's DataLoader on every rank, with all of its options.

    plain order or shuffle=True     every rank computes the order from the seed
    any other sampler               rank 0 draws each epoch's order and shares it
    workers, collate_fn, timeout …  passed unchanged to each rank's loader

We refuse a loader that already splits the data between ranks, because we would split
each rank's share again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from itertools import islice
from operator import index
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from distlab.data.epochs import hears_epoch, tell_epoch
from distlab.engines.expect import EngineError
from distlab.engines.randomness import random_numbers_kept, seed_all, seed_of
from distlab.engines.samples import Microbatch, PlannedBatches

OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)
"""Options we pass on to each rank's loader; older versions of torch lack the last."""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """The settings that we take from a caller's loader."""

    dataset: Any
    batch_size: int
    shuffles: bool
    drop_last: bool
    sampler: Any = None
    """The sampler that gives rank 0 the order; None means in order or shuffled."""
    seed: int | None = None
    """The seed of the order; None means the training's own seed."""
    worker_seed: int = 0
    """The seed of the loader's own generator."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """The number of samples in the data set."""
        return len(self.dataset)


def read_loader(loader: Any, batch_size: int | None, what: str) -> Loading:
    """Read the settings that all ranks need; `batch_size` replaces the loader's.

    Raises:
        EngineError: it isn't a DataLoader, or its samples cannot be sharded.
    """
    if not isinstance(loader, DataLoader):
        raise EngineError(
            f"{what} is a {type(loader).__name__}, must be a torch DataLoader"
        )
    kind = type(loader)
    if kind.__iter__ is not DataLoader.__iter__:
        raise EngineError(
            f"{what} is a {kind.__name__}, which overrides DataLoader.__iter__, but "
            "the ranks would not run that code: pass a plain DataLoader"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise EngineError(
            f"{what} has an IterableDataset, which has no indices to share between "
            "ranks: pass a data set with __len__ and __getitem__"
        )
    sampler, size, drops = _sampling(loader, what)
    num_samples = _length(loader.dataset, what)
    if not num_samples:
        raise EngineError(f"{what} has no samples")
    shuffles, seed, drawn = _order(sampler, num_samples, what)
    options = {name: getattr(loader, name) for name in OPTIONS if asks(loader, name)}
    if loader.multiprocessing_context is not None:
        method = loader.multiprocessing_context.get_start_method()
        options["multiprocessing_context"] = method
    generator = loader.generator
    return Loading(
        dataset=loader.dataset,
        batch_size=batch_size or size,
        shuffles=shuffles,
        drop_last=drops,
        sampler=drawn,
        seed=seed,
        worker_seed=0 if generator is None else generator.initial_seed(),
        options=options,
    )


def asks(loader: DataLoader[Any], name: str) -> bool:
    """Return True if a loader's option isn't the default."""
    parameter = signature(DataLoader).parameters.get(name)
    return parameter is not None and getattr(loader, name) != parameter.default


def _length(dataset: Any, what: str) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise EngineError(f"{what} has a data set without a length") from None


def _sampling(loader: DataLoader[Any], what: str) -> tuple[Any, int, bool]:
    """Return the sampler, the batch size, and whether to drop a smaller last batch."""
    if loader.batch_size is not None:
        return loader.sampler, loader.batch_size, bool(loader.drop_last)
    batches: Any = loader.batch_sampler
    if batches is None:
        raise EngineError(
            f"{what} has batch_size=None, so it gives single samples: pass a loader "
            "with batch_size=…"
        )
    if type(batches) is not BatchSampler:
        raise EngineError(
            f"{what} has a batch_sampler, which cannot be sharded: pass a loader with "
            "batch_size=…"
        )
    return batches.sampler, batches.batch_size, bool(batches.drop_last)


def _order(
    sampler: Any, num_samples: int, what: str
) -> tuple[bool, int | None, Any | None]:
    """Return whether it shuffles, its seed, and the sampler if we must draw from it."""
    kind = type(sampler)
    is_whole = len(getattr(sampler, "data_source", ())) == num_samples
    if kind is SequentialSampler and is_whole:
        return False, None, None
    if kind is RandomSampler and is_whole:
        is_plain = not sampler.replacement and sampler.num_samples == num_samples
        if is_plain and sampler.generator is None:
            return True, None, None
    if hasattr(sampler, "num_replicas"):
        size = getattr(sampler, "dataset", None)
        size = sampler.num_samples if size is None else len(size)
        if kind.__iter__ not in _distributed() or size != num_samples:
            raise EngineError(
                f"{what} has a {kind.__name__}, which already splits the samples "
                "between ranks: pass a loader with shuffle=True or without a sampler"
            )
        return bool(sampler.shuffle), sampler.seed or None, None
    if not hasattr(sampler, "__len__"):
        raise EngineError(
            f"{what} has a {kind.__name__} without a length, which may never end: give "
            "it __len__"
        )
    return False, None, sampler


def _distributed() -> tuple[Any, ...]:
    """Return __iter__ of the samplers that we know split samples between ranks."""
    from distlab.distributed import DistributedSampler as Ours

    return DistributedSampler.__iter__, Ours.__iter__


class DrawnOrder:
    """Draws the order of each epoch from a sampler.

    After a resume, we draw all earlier epochs again. A sampler that has its own
    generator or counts its epochs therefore continues where it stopped.
    """

    def __init__(self, sampler: Any, seed: int, num_samples: int) -> None:
        self._sampler, self._seed, self._num = sampler, seed, 0
        self._num_samples = num_samples

    def of(self, epoch: int) -> list[int]:
        """Return the sample indices of epoch 1, 2, …; ask for each epoch only once.

        Raises:
            EngineError: the sampler yields something other than sample indices.
        """
        found: list[Any] = []
        while self._num < epoch:
            self._num += 1
            with random_numbers_kept():
                seed_all(seed_of(self._seed, "order", self._num))
                set_epoch(self._sampler, self._num)
                found = list(islice(self._sampler, len(self._sampler)))
        name = type(self._sampler).__name__
        try:
            order = [index(one) for one in found]
        except TypeError as error:
            raise EngineError(
                f"the sampler {name} must yield the indices of samples: {error}"
            ) from error
        num = self._num_samples
        outside = next((one for one in order if not -num <= one < num), None)
        if outside is not None:
            raise EngineError(
                f"the sampler {name} yields index {outside}, but the data set has "
                f"{num} samples"
            )
        return order


def set_epoch(value: Any, epoch: int) -> None:
    """Tell a sampler or a data set its epoch, counted from 0 as torch does."""
    tell_epoch(value, epoch - 1)


class Batches:
    """The loader of one rank, which gets a new plan for each epoch."""

    def __init__(self, loading: Loading) -> None:
        self._plan = PlannedBatches([])
        self._generator = torch.Generator()
        self._seed = loading.worker_seed
        options = dict(loading.options)
        if hears_epoch(loading.dataset):
            # Persistent workers would never be told that the epoch has changed.
            options.pop("persistent_workers", None)
        self._loader: DataLoader[Any] = DataLoader(
            loading.dataset,
            batch_sampler=self._plan,
            generator=self._generator,
            **options,
        )

    def of(self, plan: Sequence[Microbatch]) -> Iterable[Any]:
        """Iterate over the batches of `plan`."""
        drawn = int(torch.empty((), dtype=torch.int64).random_())
        self._generator.manual_seed(seed_of(self._seed, drawn))
        self._plan.plan = plan
        return self._loader
