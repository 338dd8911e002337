"""Make a data set that any loader can use from the images of a folder or of shards.

    images = open_images(Path("DIR"), "train", TrainTransform(size=224), seed=0)
    images.set_epoch(3)                     # before each epoch: other regions, flips
    pixels, target = images[17]             # uint8 (C, S, S), int
    normalized(batch)                       # float, on the device of the batch

All randomness in a sample comes from (seed, epoch, index) and from nothing else: not
from the rank, the data worker, or earlier reads. So a resumed run, and one on
another number of ranks, reads the same pixels.

Each data worker has its own copy of the data set, and persistent workers keep it from
epoch to epoch. That's why the epoch number is in shared memory. After a change that the
workers can't see, they raise an error.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from distlab.data.decode import ImageError, open_image
from distlab.data.folder import FolderSource
from distlab.data.problems import DataError, Problem, refuse, summary
from distlab.data.shards import ShardSource, class_names, shards_in
from distlab.data.transforms import EvalTransform, TrainTransform, Transform
from distlab.seeds import any_seed

SPLITS = ("train", "val")
_LOG = logging.getLogger("distlab.data")
_FEWEST_GOOD = 1 / 50  # of 50 samples in a row one must be readable


class Source(Protocol):
    """Interface of the sources of samples: FolderSource and ShardSource."""

    classes: tuple[str, ...]
    targets: list[int]
    problems: list[Problem]

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Return a name by which a person can find the sample."""
        ...

    def read(self, index: int) -> bytes:
        """Read the bytes of its file; raise ImageError if we can't."""
        ...

    def groups(self) -> list[range]:
        """Return groups of samples to read together, such as those of a shard."""
        ...


class Sample(NamedTuple):
    """An image, or None if we can't use it; `problem` says why."""

    image: Tensor | None
    target: int
    problem: Problem | None = None


class Images(Dataset[tuple[Tensor, int]]):
    """Samples by number; `classes`, `targets` and `problems` are the source's.

    An unusable image is never fatal unless `strict` is set. Instead, `images[i]`
    returns the next usable one, and the log says so. To count exactly, use `sample(i)`.

    set_epoch also reaches the data workers of torch's loader, even persistent ones. A
    new `transform`, `seed` or `strict` doesn't, so after such a change, workers that
    were already running raise DataError.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform,
        *,
        seed: int = 0,
        strict: bool = False,
    ) -> None:
        if strict:
            refuse(source.problems, "the data set")
        seed = any_seed(seed)
        if seed < 0:
            raise ValueError(f"seed is {seed}, must be at least 0")
        self.source = source
        self.version = 0  # counts changes to the settings that workers can't see
        self._settings: dict[str, Any] = {
            "transform": transform,
            "seed": seed,
            "strict": strict,
        }
        self.classes, self.targets = source.classes, source.targets
        self.problems = source.problems
        self._share(0)

    def __len__(self) -> int:
        self._own()
        return len(self.source)

    @property
    def epoch(self) -> int:
        """Return the epoch for which we draw random numbers."""
        self._own()
        return int(self._shared[0])

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Draw samples for `epoch` from now on, also in data workers."""
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}, must be at least 0")
        self._own()
        self._shared[0] = int(epoch)

    @property
    def transform(self) -> Transform:
        """Return the transform that we apply to each image."""
        transform: Transform = self._settings["transform"]
        return transform

    @transform.setter
    def transform(self, transform: Transform) -> None:
        self._change("transform", transform)

    @property
    def seed(self) -> int:
        """Return the seed of all randomness in a sample."""
        return int(self._settings["seed"])

    @seed.setter
    def seed(self, seed: int) -> None:
        self._change("seed", int(seed))

    @property
    def strict(self) -> bool:
        """Return True if an unusable image raises an error."""
        return bool(self._settings["strict"])

    @strict.setter
    def strict(self, strict: bool) -> None:
        self._change("strict", strict)

    def sample(self, index: int, epoch: int | None = None) -> Sample:
        """Return sample `index` as it is in `epoch`, by default that of set_epoch.

        Raises:
            IndexError: there is no such sample; index -1 is the last.
            DataError: the data set is strict and the sample can't be used, or its
                transform, seed or strict was changed after this data worker started.
        """
        index = self._place(index)
        if int(self._shared[1]) != self.version:
            raise DataError(
                "the data set's transform, seed or strict was changed after this data "
                "worker started: make a new DataLoader, or turn persistent_workers off"
            )
        epoch = self.epoch if epoch is None else epoch
        target = self.targets[index]
        # Integers of any size seed all of the generator's state: no two collide.
        random = Random((self.seed << 96) + (epoch << 64) + index)
        try:
            image = self.transform(open_image(self.source.read(index)), random)
        except ImageError as error:
            problem = Problem(self.source.name(index), error.kind, str(error))
            if self.strict:
                raise DataError(str(problem)) from error
            return Sample(None, target, problem)
        return Sample(image, target)

    def usable(self, index: int, epoch: int | None = None) -> tuple[Tensor, int, int]:
        """Return the image and target at `index`, or the next usable ones.

        Returns (image, target, number of samples skipped). After the last sample, the
        search continues with the first.

        Raises:
            IndexError: there is no such sample.
            DataError: 50 in a row are unusable.
        """
        size, index = len(self), self._place(index)
        for skipped in range(min(size, round(1 / _FEWEST_GOOD))):
            image, target, problem = self.sample((index + skipped) % size, epoch)
            if image is not None:
                return image, target, skipped
            _LOG.warning("%s; the next image takes its place", problem)
        raise DataError(f"no image can be used from {self.source.name(index)} onward")

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return (image, target), or those of the next image that can be used.

        Raises:
            IndexError: there is no such sample, which ends `for x in images`.
        """
        image, target, _ = self.usable(index)
        return image, target

    def _place(self, index: int) -> int:
        index, size = operator.index(index), len(self.source)
        if not -size <= index < size:
            raise IndexError(f"sample {index}: there are {size}")
        return index % size

    # ── copies ──────────────────────────────────────────────────────────────────────

    def _share(self, epoch: int) -> None:
        """Set up memory shared by this process and the data workers it will start."""
        self._owner = os.getpid()
        self._shared = torch.tensor([epoch, self.version], dtype=torch.int64)
        with suppress(OSError, RuntimeError):  # without it there are no data workers
            self._shared.share_memory_()

    def _own(self) -> None:
        """Stop sharing if this is another process, such as a rank, but not a worker."""
        if os.getpid() != self._owner and get_worker_info() is None:
            self._share(int(self._shared[0]))

    def _change(self, name: str, value: Any) -> None:
        self._own()
        self._settings[name] = value
        self.version += 1
        self._shared[1] = self.version

    def __copy__(self) -> Images:
        """Copy the data set; the copy has its own epoch and settings."""
        copy = Images.__new__(type(self))
        copy.__dict__.update(self.__dict__, _settings=dict(self._settings))
        copy._share(self.epoch)
        return copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self._shared.is_shared():  # it came from another process as a copy
            self._share(int(self._shared[0]))


def open_images(
    root: Path,
    split: str = "train",
    transform: Transform | None = None,
    *,
    seed: int = 0,
    strict: bool = False,
) -> Images:
    """Open the images of a split: DIR/split-*.tar if there are any, or DIR/split.

    The default transform is ImageNet's: 224 × 224, random for train only.

    Raises:
        DataError: there are none, or, with `strict`, there is a problem.
    """
    if transform is None:
        transform = TrainTransform() if split == SPLITS[0] else EvalTransform()
    source = open_source(root, split)
    images = Images(source, transform, seed=seed, strict=strict)
    if source.problems:
        _LOG.warning("%s of %s: %s", split, root, summary(source.problems))
    return images


def open_source(root: Path, split: str) -> Source:
    """Open the source of a split, with classes numbered as in train.

    Raises:
        DataError: there is neither a folder nor a shard, there are both, or they have
            no image; or the shards' classes have no names, or other names than the
            classes in the folder next to them.
    """
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "is not there"
        raise DataError(f"{root} {what}")
    has_shards = _has_shards(root, split)
    if split == SPLITS[0]:
        return ShardSource(root, split) if has_shards else FolderSource(root, split)
    classes = _classes_of_train(root, has_shards=has_shards)
    if has_shards:
        return ShardSource(root, split, classes=classes)
    return FolderSource(root, split, classes=classes)


def _has_shards(root: Path, split: str) -> bool:
    """Return True if the split is in shards, and False if it is in a folder."""
    shards, folder = shards_in(root, split), root / split
    if shards and folder.is_dir():
        raise DataError(
            f"{root} has both {split}/ and {shards[0].name}, and one of them may be "
            "out of date: move it away"
        )
    if not shards and not folder.is_dir():
        packed = [p.name for p in root.glob(f"{split}-*.t*gz")]
        hint = f"; unpack {packed[0]}: shards are read by position" if packed else ""
        raise DataError(
            f"{root} has neither the folder {split} nor {split}-*.tar{hint}"
        )
    return bool(shards)


def _classes_of_train(root: Path, *, has_shards: bool) -> Sequence[str] | None:
    """Return the classes of train, which number another split; None without train.

    Raises:
        DataError: one split is in shards and the other in a folder, and the names of
            their classes differ.
    """
    train = SPLITS[0]
    if not shards_in(root, train) and not (root / train).is_dir():
        return None
    train_has_shards = _has_shards(root, train)
    if not train_has_shards:
        classes: Sequence[str] = FolderSource(root, train).classes
    else:
        classes = ShardSource(root, train).classes
    if has_shards != train_has_shards:
        # Shards number classes and folders name them, so we need classes.txt for both.
        names = class_names(root)
        if names is None or tuple(classes) != names:
            raise DataError(
                f"{root} has train and another split, one in shards and one in "
                "folders: classes.txt must name the classes, in the order of the "
                "folders' names"
            )
    return classes
