"""Find, check and load image sets of four IDX files, such as MNIST."""

from __future__ import annotations

import functools
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from distlab.data.idx import IdxError, content_of, read_idx

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
"""The four files, images and labels in turn; we hold out the second pair."""

SIDE = 28  # pixels
NUM_CLASSES = 10
_LAYOUTS = ("", "raw", "MNIST/raw", "FashionMNIST/raw")  # the last three: torchvision's
_NUM_DIMS = {name: 3 if "images" in name else 1 for name in NAMES}

Files = dict[str, Path]
"""The path of each of the four NAMES."""


@dataclass(frozen=True, kw_only=True)
class KnownSet:
    """A set of files with known checksums; `places` are folders to look in."""

    name: str
    title: str
    mirrors: tuple[str, ...]
    places: tuple[Path, ...]
    sha256: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Images:
    """Inputs are (N, 1, 28, 28) float32 in [0, 1], targets (N,) int64 in 0 … 9."""

    train_inputs: Tensor
    train_targets: Tensor
    held_out_inputs: Tensor
    held_out_targets: Tensor


@functools.cache
def known_sets() -> dict[str, KnownSet]:
    """Return the sets of idx_sets.toml by name."""
    path = Path(__file__).with_suffix(".toml")
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return {
        name: KnownSet(
            name=name,
            title=entry["title"],
            mirrors=tuple(entry["mirrors"]),
            places=tuple(Path(place) for place in entry["places"]),
            sha256=entry["sha256"],
        )
        for name, entry in table.items()
    }


def cache_folder(name: str) -> Path:
    """Return the folder for a downloaded set: DISTLAB_DATA or ~/.cache/distlab."""
    home = os.environ.get("DISTLAB_DATA")
    return (Path(home) if home else Path.home() / ".cache" / "distlab") / name


def find_files(folder: Path) -> Files:
    """Find the four files in `folder`, under their usual names, plain or packed.

    All four come from the same subfolder, so the labels of one set are never combined
    with the images of another.

    Raises:
        IdxError: the folder can't be read, a file is missing, or its plain and packed
            versions have different contents.
    """
    try:
        present = [path for path in _candidates(folder) if path.is_file()]
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "is not there"
            raise IdxError(f"{folder} {what}")
        if not present:
            os.listdir(folder)  # says why, if it is that we may not look inside
    except OSError as error:
        raise IdxError(f"{folder} cannot be read: {error.strerror or error}") from error
    if not present:
        raise IdxError(f"none of the four files is in {folder}: {NAMES[0]}[.gz], …")
    layouts: dict[Path, dict[str, list[Path]]] = {}
    for path in present:
        found = layouts.setdefault(path.parent, {})
        found.setdefault(_canonical(path), []).append(path)
    where, files = max(layouts.items(), key=lambda layout: len(layout[1]))
    missing = [name for name in NAMES if name not in files]
    if missing:
        raise IdxError(f"there is no {' and no '.join(missing)}[.gz] in {where}")
    return {name: _one_of(paths) for name, paths in files.items()}


def _one_of(paths: list[Path]) -> Path:
    """Return the first file, after checking that all have the same content."""
    first, *others = paths
    for other in others:
        if content_of(other) != content_of(first):
            raise IdxError(
                f"{first} and {other.name} next to it have different contents: remove "
                "the one that is out of date"
            )
    return first


def usual_files(known: KnownSet) -> Files | None:
    """Find the four files in the usual places: downloaded, or from a package."""
    for place in (cache_folder(known.name), *known.places):
        if place.is_dir():
            try:
                return find_files(place)
            except IdxError:
                continue  # an unfinished download, say
    return None


def read_images(files: Files, known: KnownSet | None = None) -> Images:
    """Read the four files as tensors; a known set must match its checksums.

    Raises:
        IdxError: one of the files is damaged, or doesn't fit the others.
    """
    values = {
        name: read_idx(
            files[name], _NUM_DIMS[name], sha256=known.sha256[name] if known else ""
        )
        for name in NAMES
    }
    for images, labels in (NAMES[:2], NAMES[2:]):
        if values[images].shape[1:] != (SIDE, SIDE):
            height, width = values[images].shape[1:]
            raise IdxError(
                f"{files[images]} holds images of {height} × {width} pixels, not "
                f"{SIDE} × {SIDE}"
            )
        if len(values[images]) != len(values[labels]):
            raise IdxError(
                f"{files[labels]} has {len(values[labels]):,} labels for the "
                f"{len(values[images]):,} images of {files[images]}"
            )
        if values[labels].max() >= NUM_CLASSES:
            place = int((values[labels] >= NUM_CLASSES).argmax())
            raise IdxError(
                f"{files[labels]} has the label {values[labels][place]} at place "
                f"{place:,}; classes are 0 … {NUM_CLASSES - 1}"
            )
    pixels = {n: torch.from_numpy(v) for n, v in values.items()}
    return Images(
        train_inputs=_scaled(pixels[NAMES[0]]),
        train_targets=pixels[NAMES[1]].long(),
        held_out_inputs=_scaled(pixels[NAMES[2]]),
        held_out_targets=pixels[NAMES[3]].long(),
    )


def _scaled(pixels: Tensor) -> Tensor:
    return pixels.unsqueeze(1).float().div_(255)  # (N, 1, 28, 28)


def _candidates(folder: Path) -> list[Path]:
    return [
        folder / layout / f"{spelling}{packed}"
        for layout in _LAYOUTS
        for packed in ("", ".gz")
        for name in NAMES
        for spelling in (name, name.replace("-idx", ".idx"))
    ]


def _canonical(path: Path) -> str:
    return path.name.removesuffix(".gz").replace(".idx", "-idx")
