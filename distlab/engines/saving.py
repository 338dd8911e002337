"""Checkpoints of the engines: one file after an epoch, unsharded, without code in it.

    <folder>/epoch_0003.pt     what is left of a save that was cut short: *.tmp

Any backend loads it on any number of ranks.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from distlab.engines.expect import EngineError

FORMAT = 1


def save(folder: Path, epoch: int, state: dict[str, Any]) -> Path:
    """Write the checkpoint of `epoch` finished epochs; complete or not there.

    Raises:
        EngineError: it cannot be written.
    """
    path = folder / f"epoch_{epoch:04d}.pt"
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            torch.save({"format": FORMAT, "epoch": epoch, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        _sync_folder(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise EngineError(
            f"the checkpoint {path} cannot be written: {reason}"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(source: bool | str | Path, folder: str | Path | None) -> dict[str, Any] | None:
    """The checkpoint to continue from, or None: there is none in `folder` yet.

    A damaged one in `folder` is passed over for the one before it.

    Raises:
        EngineError: a file that was named is not there or is no checkpoint.
    """
    if source is False:
        return None
    if source is not True:
        return _read(Path(source))
    assert folder is not None
    for path in sorted(Path(folder).glob("epoch_*.pt"), reverse=True):
        try:
            return _read(path)
        except EngineError:
            continue
    return None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise EngineError(f"there is no checkpoint {path}")
    try:
        if not zipfile.is_zipfile(path):  # torch would read it as an older format
            raise EngineError(f"{path} is damaged or no checkpoint")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (
        OSError,
        RuntimeError,
        EOFError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
    ) as error:
        raise EngineError(f"{path} is damaged or no checkpoint") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise EngineError(f"{path} is no checkpoint of distlab's engines")
    return state
