"""Images of a folder or of shards as a data set that any loader can use.

    images = open_images(Path("DIR"), "train", TrainTransform(size=224), seed=0)
    images.set_epoch(3)                     # before each epoch: other regions, flips
    pixels, target = images[17]             # uint8 (C, S, S), int
    normalized(batch)                       # float, on the device of the batch

What is random in a sample comes from (seed, epoch, index) and from nothing else: not
from the rank, the data worker, or what was read before. So a resumed run, and one on
another number of ranks, reads the same pixels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.utils.data import Dataset

from distlab.data.decode import ImageError, open_image
from distlab.data.folder import FolderSource
from distlab.data.problems import DataError, Problem, refuse
from distlab.data.shards import ShardSource
from distlab.data.transforms import EvalTransform, TrainTransform, Transform

SPLITS = ("train", "val")
_LOG = logging.getLogger("distlab.data")
_FEWEST_GOOD = 1 / 50  # of 50 samples in a row one must be readable


class Source(Protocol):
    """Where samples come from: FolderSource and ShardSource."""

    classes: tuple[str, ...]
    targets: list[int]
    problems: list[Problem]

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """How a person finds the sample."""
        ...

    def read(self, index: int) -> bytes:
        """The bytes of its file; ImageError if they cannot be read."""
        ...

    def groups(self) -> list[range]:
        """Samples that should be read together, such as those of a shard."""
        ...


class Sample(NamedTuple):
    """An image, or none, if it could not be used; `problem` says why."""

    image: Tensor | None
    target: int
    problem: Problem | None = None


class Images(Dataset[tuple[Tensor, int]]):
    """Samples by number. `classes`, `targets` and `problems` are the source's.

    An image that cannot be used is never fatal, unless `strict`: `images[i]` is then
    the next one that can, and the log says so. Who counts exactly uses `sample(i)`.
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
        self.source, self.transform = source, transform
        self.seed, self.strict, self.epoch = seed, strict, 0
        self.classes, self.targets = source.classes, source.targets
        self.problems = source.problems

    def __len__(self) -> int:
        return len(self.source)

    def set_epoch(self, epoch: int) -> None:
        """Draw the random parts of `epoch` from now on."""
        self.epoch = epoch

    def sample(self, index: int, epoch: int | None = None) -> Sample:
        """Sample `index` as it is in `epoch`, by default that of set_epoch.

        Raises:
            DataError: it cannot be used, and the data set is strict.
        """
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
        """The image and target at `index`, or the next ones that can be used.

        Also how many were passed over: (image, target, number).

        Raises:
            DataError: none of 50 in a row can be used.
        """
        size = len(self)
        for skipped in range(min(size, round(1 / _FEWEST_GOOD))):
            image, target, problem = self.sample((index + skipped) % size, epoch)
            if image is not None:
                return image, target, skipped
            _LOG.warning("%s; the next image takes its place", problem)
        raise DataError(f"no image can be used from {self.source.name(index)} onward")

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """(image, target); the next usable image's where this one is not."""
        image, target, _ = self.usable(index)
        return image, target


def open_images(
    root: Path,
    split: str = "train",
    transform: Transform | None = None,
    *,
    seed: int = 0,
    strict: bool = False,
) -> Images:
    """The images of a split: of DIR/split-*.tar if there are any, or of DIR/split.

    Without a transform, that of ImageNet: 224 × 224, random for train only.

    Raises:
        DataError: there are none, or, with `strict`, there is a problem.
    """
    if transform is None:
        transform = TrainTransform() if split == SPLITS[0] else EvalTransform()
    source = open_source(root, split)
    return Images(source, transform, seed=seed, strict=strict)


def open_source(root: Path, split: str) -> Source:
    """The source of a split; classes are numbered as in train.

    Raises:
        DataError: there is neither a folder nor a shard, or no image in them.
    """
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "is not there"
        raise DataError(f"{root} {what}")
    if any(root.glob(f"{split}-*.tar")):
        return ShardSource(root, split)
    if not (root / split).is_dir():
        raise DataError(f"{root} has neither the folder {split} nor {split}-*.tar")
    classes: Sequence[str] | None = None
    if split != SPLITS[0] and (root / SPLITS[0]).is_dir():
        classes = FolderSource(root, SPLITS[0]).classes
    return FolderSource(root, split, classes=classes)
