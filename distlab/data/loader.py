"""Load batches of images for one rank; you can resume at every batch.

    loader = ImageLoader(images, 256, rank, world_size, seed=0, num_workers=4)
    for epoch in range(loader.epoch, 90):
        loader.set_epoch(epoch)
        for batch in loader:                    # batch.images uint8 (N, C, S, S)
            ...                                 # loader.state_dict() at any moment

An epoch is one order of all samples, split into global batches, each split over
the ranks, so a saved position works for any number of ranks. A data worker is
told (epoch, index) of each sample and keeps nothing between them, so workers live as
long as the loader. If one dies, we replace it and continue at the same batch.
If you change the images' transform, the next epoch starts new workers. If a second loop
uses the workers during a loop, for example to peek at a batch, they start again too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from distlab.data.images import Images
from distlab.data.loops import EpochLoops, check_state, saved_position
from distlab.data.problems import Problem
from distlab.seeds import any_seed

Place = tuple[int, int]
"""An epoch, and the number of a sample in the data set."""

_Row = tuple[Tensor | None, int, list[Problem]]
_SETTINGS = ("num_samples", "global_batch_size", "shuffle", "seed")
_DEAD = "DataLoader worker"
_WINDOW = 8  # shards whose samples are shuffled together


class Batch(NamedTuple):
    """Images (N, C, S, S) uint8, targets (N,) int64, and the unusable samples."""

    images: Tensor
    targets: Tensor
    problems: tuple[Problem, ...]

    def pin_memory(self) -> Batch:
        """Move the batch to pinned memory; torch's loader calls this."""
        return Batch(self.images.pin_memory(), self.targets.pin_memory(), self.problems)


class ImageLoader(EpochLoops):
    """Yields a rank's batches; all ranks construct it alike, except for `rank`.

    With `is_train`, we replace an unusable image by the next usable one, so
    that batches keep their size. Otherwise we leave it out, so an evaluation counts
    each usable image once. `problems` names both.

    A loop begins with the first batch of the epoch. After load_state_dict, loops begin
    at the loaded position, until one reaches the end or another epoch starts.

    `wait_s` counts the seconds spent waiting for batches, and `worker_restarts` how
    often we replaced data workers.
    """

    def __init__(
        self,
        images: Images,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        *,
        is_train: bool = True,
        seed: int = 0,
        num_workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool | None = None,
        max_restarts: int = 3,
    ) -> None:
        super().__init__()
        if global_batch_size < 1:
            raise ValueError(f"the global batch size is {global_batch_size}")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}, must be from 0 to {world_size - 1}")
        self.images, self.num_samples = images, len(images)
        self.global_batch_size = global_batch_size
        self.rank, self.world_size = rank, world_size
        self.shuffle, self.seed = is_train, any_seed(seed)
        self.worker_restarts = 0
        if pin_memory is None:
            pin_memory = torch.cuda.is_available()
        self.max_restarts, self.wait_s = max_restarts, 0.0
        self.problems: dict[str, Problem] = {}
        self._batches = _Batches()
        self._arguments: dict[str, Any] = {
            "num_workers": num_workers,
            "persistent_workers": num_workers > 0,
            "prefetch_factor": prefetch if num_workers else None,
            "pin_memory": pin_memory,
            "worker_init_fn": _start_worker,
        }
        self._loader = self._start()

    def __len__(self) -> int:
        """The number of steps of an epoch: the same on every rank."""
        return math.ceil(self.num_samples / self.global_batch_size)

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over this epoch's batches; after load_state_dict, over the rest."""
        yield from self.follow(self._read(self._begin))

    def _read(self, first: int) -> Iterator[Batch]:
        """Read the batches of this epoch, starting with number `first`."""
        places = [[(self.epoch, index) for index in b] for b in self.batches()[first:]]
        batches: Iterator[Batch] | None = None
        for number in range(len(places)):
            start_s = time.perf_counter()
            if batches is None or self._batches.places is not places:
                batches = self._iterate(places, number)
            batch = self._next(batches)
            if batch is None:
                batches = self._iterate(places, number)
                batch = next(batches)
            self.wait_s += time.perf_counter() - start_s
            self.problems |= {problem.name: problem for problem in batch.problems}
            yield batch

    def batches(self) -> list[list[int]]:
        """Return this rank's samples in this epoch, one list per step."""
        order, size = self.order(), self.global_batch_size
        starts = range(0, self.num_samples, size)
        return [order[s : s + size][self.rank :: self.world_size] for s in starts]

    def order(self) -> list[int]:
        """Return all samples in this epoch's order, which is the same on every rank.

        We shuffle the shards, then the samples of every few shards together.
        """
        groups = self.images.source.groups()
        if not self.shuffle:
            return [index for group in groups for index in group]
        random = Random((self.seed << 64) + self.epoch)
        random.shuffle(groups)
        order: list[int] = []
        for start in range(0, len(groups), _WINDOW):
            window = [i for group in groups[start : start + _WINDOW] for i in group]
            random.shuffle(window)
            order += window
        return order

    def state_dict(self) -> dict[str, Any]:
        """Return the position and what the order depends on, ready for JSON.

        A state saved after the last batch says that no batch of this epoch is left.
        """
        state = {name: getattr(self, name) for name in _SETTINGS}
        return {"epoch": self.epoch, "num_delivered": self.num_delivered, **state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the loader that saved `state` was.

        Raises:
            ValueError: its data size, batch size, shuffle or seed differs. This loader
                is then unchanged.
        """
        check_state(self, state, _SETTINGS, ("epoch", "num_delivered"))
        self.epoch, number = saved_position(state, "num_delivered", len(self))
        self.begin_at(number)

    def _iterate(self, places: list[list[Place]], number: int) -> Iterator[Batch]:
        """Let the data workers read `places`, starting at `number`."""
        if self._version != self.images.version:  # the workers have old settings
            self._loader = self._start()
        self._batches.places, self._batches.first = places, number
        return iter(self._loader)

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        """The next batch; None if a data worker died and all were replaced.

        Raises:
            RuntimeError: one died, more often than max_restarts.
        """
        try:
            return next(batches)
        except RuntimeError as error:
            if _DEAD not in str(error) or self.worker_restarts >= self.max_restarts:
                raise
            self.worker_restarts += 1
            self._loader = self._start()
            return None

    def _start(self) -> DataLoader[Batch]:
        self._version = self.images.version
        return DataLoader(
            _Samples(self.images, is_train=self.shuffle),
            batch_sampler=self._batches,
            collate_fn=self._collate(),
            generator=torch.Generator(),  # the global one is not drawn from
            **self._arguments,
        )

    def _collate(self) -> _Collate:
        return _Collate(self.images.transform.shape)


class _Batches:
    """The batches that torch's loader draws from; set before each epoch."""

    def __init__(self) -> None:
        self.places: list[list[Place]] = []
        self.first = 0

    def __iter__(self) -> Iterator[list[Place]]:
        return iter(self.places[self.first :])

    def __len__(self) -> int:
        return len(self.places) - self.first


class _Samples(Dataset[Any]):
    """By (epoch, index): the image or None, the target, and the problems on the way."""

    def __init__(self, images: Images, *, is_train: bool) -> None:
        self.images, self.is_train = images, is_train

    def __getitem__(self, place: Place) -> _Row:
        epoch, index = place
        image, target, problem = self.images.sample(index, epoch)
        if problem is None or not self.is_train:
            return image, target, [problem] if problem else []
        following = (index + 1) % len(self.images)
        image, target, _ = self.images.usable(following, epoch)
        return image, target, [problem]


class _Collate:
    """Stack the images that there are; a batch without any keeps their shape."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.shape = shape

    def __call__(self, samples: list[_Row]) -> Batch:
        good = [(image, target) for image, target, _ in samples if image is not None]
        images = torch.empty((len(good), *self.shape), dtype=torch.uint8)
        for row, (image, _) in enumerate(good):
            images[row] = image
        targets = torch.tensor([target for _, target in good], dtype=torch.int64)
        problems = tuple(problem for _, _, found in samples for problem in found)
        return Batch(images, targets, problems)


def _start_worker(worker: int) -> None:
    torch.set_num_threads(1)
