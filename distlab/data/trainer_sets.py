"""Open the trainer's image sets by name, as torch data sets of (image, class)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from distlab.data.digits import load_digits_split
from distlab.data.idx_sets import known_sets, read_images, usual_files
from distlab.data.images import open_images
from distlab.data.transforms import EvalTransform, TrainTransform


@dataclass(frozen=True, kw_only=True)
class ImageSets:
    """Training and validation sets of (channels, image_size, image_size) images.

    Images are float32 in [0, 1], or uint8 from a folder. `identity` is the set's name.
    For a folder, it depends on the classes and their numbers, but not on where the
    folder is.
    """

    train: Dataset[Any]
    held_out: Dataset[Any]
    num_classes: int
    channels: int
    image_size: int
    identity: str


FOLDER_SIZE = 224  # pixels of a side, if nothing else is asked for


def open_sets(
    name: str, num_samples: int = 0, image_size: int = 0, seed: int = 0
) -> ImageSets:
    """Open the set of this name; train on its first `num_samples` if that isn't 0.

    Any other name refers to a folder in ImageNet's layout or of shards, whose images
    we crop to `image_size` at random places that depend on `seed`.

    Raises:
        ValueError: there is no such set, its files are missing or damaged, or it
            has fewer samples.
    """
    if name == "digits":
        digits = load_digits_split()
        pairs = [
            (digits.train_inputs.float().view(-1, 1, 8, 8), digits.train_targets),
            (digits.held_out_inputs.float().view(-1, 1, 8, 8), digits.held_out_targets),
        ]
    elif name in known_sets():
        known = known_sets()[name]
        files = usual_files(known)
        if files is None:
            raise ValueError(
                f"--data {name}: its files are not here; get them with `distlab ddp "
                f"--dataset {name} --download`"
            )
        images = read_images(files, known)
        pairs = [
            (images.train_inputs, images.train_targets),
            (images.held_out_inputs, images.held_out_targets),
        ]
    else:
        return _of_folder(Path(name), num_samples, image_size or FOLDER_SIZE, seed)
    return _of_tensors(name, pairs, num_samples)


def _of_tensors(
    name: str, pairs: list[tuple[Tensor, Tensor]], num_samples: int
) -> ImageSets:
    (inputs, targets), held_out = pairs
    if num_samples > len(inputs):
        raise ValueError(
            f"--num-samples {num_samples}: the set has {len(inputs)} to train on"
        )
    count = num_samples or len(inputs)
    return ImageSets(
        train=TensorDataset(inputs[:count], targets[:count]),
        held_out=TensorDataset(*held_out),
        num_classes=int(torch.cat([targets, held_out[1]]).max()) + 1,
        channels=inputs.shape[1],
        image_size=inputs.shape[-1],
        identity=name,
    )


def _of_folder(folder: Path, num_samples: int, image_size: int, seed: int) -> ImageSets:
    if not folder.is_dir():
        names = ", ".join(("digits", *known_sets()))
        raise ValueError(f"--data {folder}: no such folder, and no set: {names}")
    if num_samples:
        raise ValueError("--num-samples: a folder is read in full")
    resize = round(image_size * 256 / 224)  # as for ImageNet
    train = open_images(folder, "train", TrainTransform(size=image_size), seed=seed)
    crop = EvalTransform(size=image_size, resize=resize)
    return ImageSets(
        train=train,
        held_out=open_images(folder, "val", crop),
        num_classes=len(train.classes),
        channels=3,
        image_size=image_size,
        identity=_identity(train.classes),
    )


def _identity(classes: tuple[str, ...]) -> str:
    named = "\n".join(classes).encode("utf-8", "surrogateescape")
    digest = hashlib.sha256(named).hexdigest()[:8]
    return f"{len(classes)} classes, SHA-256 of their names {digest}…"
