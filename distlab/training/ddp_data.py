"""The data and the model of `distlab ddp`, the same for the parent and the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from distlab.data.digits import Digits, load_digits_split
from distlab.data.download import download
from distlab.data.idx import IdxError
from distlab.data.idx_sets import (
    Files,
    Images,
    KnownSet,
    cache_folder,
    find_files,
    known_sets,
    read_images,
    usual_files,
)
from distlab.models.convnet import make_convnet
from distlab.models.mlp import make_mlp
from distlab.training.ddp_config import IDX, DdpConfig

Split = Digits | Images


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a data set comes from: four files, or None for the digits, and a note.

    `known` is the set whose bytes the files must match.
    """

    files: Files | None
    known: KnownSet | None
    note: str


def locate(
    dataset: str,
    *,
    folder: Path | None = None,
    may_download: bool = False,
    say: Callable[[str], None] = print,
) -> Origin:
    """Find the files of `dataset` in `folder`, or in the usual places.

    Raises:
        ValueError: the files don't exist, or the settings contradict each other.
        OSError: the files couldn't be downloaded.
    """
    if dataset == "digits":
        if folder or may_download:
            flag = "--data-dir" if folder else "--download"
            raise ValueError(f"{flag}: the digits come with distlab, no file is read")
        note = "1,437 images of 8×8 pixels, 360 held out; from UCI"
        return Origin(files=None, known=None, note=note)
    if dataset == IDX:
        return _own_files(folder, may_download)
    known = known_sets()[dataset]
    if may_download:
        download(known, folder or cache_folder(dataset), say=say)
    files = find_files(folder) if folder else _where_usual(known)
    note = f"{known.title}; size and SHA-256 of each file are right"
    return Origin(files=files, known=known, note=note)


def _own_files(folder: Path | None, may_download: bool) -> Origin:
    if may_download:
        raise ValueError("--download: files of your own are nowhere to be had")
    if folder is None:
        raise ValueError(f"--dataset {IDX} is four files of your own: give --data-dir")
    note = "files of your own: form and labels are right, no checksum is known"
    return Origin(files=find_files(folder), known=None, note=note)


def _where_usual(known: KnownSet) -> Files:
    files = usual_files(known)
    if files is not None:
        return files
    places = [cache_folder(known.name), *known.places]
    raise IdxError(
        f"{known.title} is not in {' or '.join(map(str, places))}: get it with "
        "--download, or name the folder of its four files with --data-dir"
    )


def read_split(files: Files | None, known: KnownSet | None = None) -> Split:
    """Read the images and targets, both to train on and held out.

    Raises:
        IdxError: a file is damaged, or isn't the known one.
    """
    return read_images(files, known) if files else load_digits_split()


def make_model(config: DdpConfig, rank: int = 0) -> nn.Module:
    """Create the network for the data set, with different weights on each rank."""
    make = make_mlp if config.dataset == "digits" else make_convnet
    return make(seed=config.seed + rank)


def make_optimizer(config: DdpConfig, model: nn.Module) -> Optimizer:
    """Create the optimizer that the user asked for."""
    parameters, decay = model.parameters(), config.weight_decay
    if config.optimizer == "sgd":
        return SGD(
            parameters,
            lr=config.learning_rate,
            momentum=config.momentum,
            weight_decay=decay,
        )
    kind = Adam if config.optimizer == "adam" else AdamW
    return kind(parameters, lr=config.learning_rate, weight_decay=decay)
