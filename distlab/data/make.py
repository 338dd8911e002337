"""Make an image folder and shards from this machine's images, without downloads.

    digits          the 1,797 handwritten digits of data/digits.py: 8 × 8 pixels,
                    enlarged to 32 × 32; ten classes
    photos          three photographs that come with scikit-learn and matplotlib:
                    overlapping windows of 500 × 375 pixels; a class is a photograph
    fashion-mnist   70,000 pictures of clothes, 28 × 28, where its files are (Debian:
                    dataset-fashion-mnist, or `distlab ddp --download`)

The photos are for trying and timing code that reads photographs; a model of three
photographs is of no use.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from distlab.data.folder import FolderSource
from distlab.data.problems import DataError
from distlab.data.shards import write_shards

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

QUALITY = 90  # of the JPEGs
_WINDOW = (500, 375)
_CLOTHES = (
    "t-shirt", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle-boot",
)  # fmt: skip
_PHOTOS = {
    "china": ("sklearn", "datasets/images/china.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "portrait": ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
}


class Picture(NamedTuple):
    """An image for a split and a class; `whence` identifies it within its set."""

    split: str
    target: int
    whence: str
    image: Image


@dataclass(frozen=True)
class Recipe:
    """A set of images: its classes, their origin, and their number."""

    classes: tuple[str, ...]
    source: str
    most: int
    pictures: Callable[[int], Iterator[Picture]]


def make(root: Path, kind: str = "digits", *, num_images: int = 0) -> str:
    """Write DIR/train, DIR/val and DIR/shards; a fifth is val. Returns one sentence.

    The same arguments give the same pixels. `num_images` limits their number.

    Raises:
        DataError: the folder isn't empty, or this machine lacks the images.
    """
    known = recipes()
    if kind not in known:
        raise DataError(f"there are no images called {kind!r}; {', '.join(known)}")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise DataError(f"{root} is there and is not empty")
    recipe = known[kind]
    if not 0 <= num_images <= recipe.most:
        raise DataError(f"{kind} has up to {recipe.most:,} images, not {num_images:,}")
    wanted, written = num_images or recipe.most, 0
    for picture in recipe.pictures(wanted):
        folder = root / picture.split / recipe.classes[picture.target]
        folder.mkdir(parents=True, exist_ok=True)
        picture.image.save(folder / f"{picture.whence}.jpg", quality=QUALITY)
        written += 1
    num_shards = sum(shards_of(root, split) for split in ("train", "val"))
    return (
        f"{written:,} images in {len(recipe.classes)} classes from {recipe.source}: "
        f"{root}/train, {root}/val, and {num_shards} shards in {root}/shards"
    )


def shards_of(root: Path, split: str, *, per_shard: int = 500) -> int:
    """Write a split's files as shards, shuffled once; return how many shards."""
    source = FolderSource(root, split)
    order = list(range(len(source)))
    Random(0).shuffle(order)  # or each shard would have one class
    samples = (
        (Path(source.name(i)).suffix, source.read(i), source.targets[i]) for i in order
    )
    return write_shards(
        root / "shards", split, samples, per_shard=per_shard, classes=source.classes
    )


def recipes() -> dict[str, Recipe]:
    """Return the sets of images by name."""
    names = tuple(str(digit) for digit in range(10))
    digits = "UCI's handwritten digits"
    photos = "scikit-learn's china.jpg and flower.jpg and matplotlib's grace_hopper.jpg"
    clothes = "Fashion-MNIST"
    return {
        "digits": Recipe(names, digits, 1797, _digits),
        "photos": Recipe(tuple(_PHOTOS), photos, 30_000, _photos),
        "fashion-mnist": Recipe(_CLOTHES, clothes, 70_000, _fashion),
    }


def _digits(wanted: int) -> Iterator[Picture]:
    from distlab.data.digits import load_digits_split

    digits = load_digits_split()
    splits = (digits.train_inputs, digits.train_targets)
    held_out = (digits.held_out_inputs, digits.held_out_targets)
    yield from _pictures(splits, held_out, wanted, (8, 8), (32, 32))


def _fashion(wanted: int) -> Iterator[Picture]:
    from distlab.data.idx import IdxError
    from distlab.data.idx_sets import cache_folder, find_files, known_sets, read_images

    known = known_sets()["fashion-mnist"]
    for folder in (*known.places, cache_folder("fashion-mnist")):
        try:
            files = find_files(folder)
        except IdxError:
            continue
        images = read_images(files, known)
        splits = (images.train_inputs, images.train_targets)
        held_out = (images.held_out_inputs, images.held_out_targets)
        yield from _pictures(splits, held_out, wanted, (28, 28), (28, 28))
        return
    where = f"{known.places[0]} or {cache_folder('fashion-mnist')}"
    raise DataError(f"the files of Fashion-MNIST are not in {where}")


def _pictures(
    train: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    wanted: int,
    size: tuple[int, int],
    enlarged: tuple[int, int],
) -> Iterator[Picture]:
    """Gray pixels in [0, 1] as images; a fifth of `wanted` is val."""
    from PIL import Image

    num_val = min(len(held_out[0]), math.ceil(wanted / 5))
    for split, (inputs, targets), count in (
        ("train", train, wanted - num_val),
        ("val", held_out, num_val),
    ):
        values = (inputs[:count].reshape(-1, *size) * 255).round().byte().numpy()
        for number, (value, target) in enumerate(
            zip(values, targets.tolist(), strict=False)
        ):
            image = Image.fromarray(value).resize(enlarged, Image.Resampling.BICUBIC)
            yield Picture(split, target, f"{number:05d}", image)


def _photos(wanted: int) -> Iterator[Picture]:
    """Windows at random places; those of val have their middle in the lowest fifth."""
    from PIL import Image

    random, opened = Random(0), []
    for module, path in _PHOTOS.values():
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise DataError(
                f"{module}, which has a photograph, is not installed: pip install "
                "scikit-learn matplotlib"
            )
        data = (Path(spec.origin).parent / path).read_bytes()
        opened.append(Image.open(io.BytesIO(data)).convert("RGB"))
    wide, tall = _WINDOW
    for number in range(wanted):
        target, split = number % len(opened), "val" if number % 5 == 4 else "train"
        image = opened[target]
        across, down = image.size[0] - wide, image.size[1] - tall
        low, high = (round(0.8 * down), down) if split == "val" else (0, down // 2)
        left, top = random.randint(0, across), random.randint(low, high)
        window = image.crop((left, top, left + wide, top + tall))
        yield Picture(split, target, f"{number:05d}", window)
