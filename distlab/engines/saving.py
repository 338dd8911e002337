"""Save engines' checkpoints: one file per epoch, unsharded and without code.

    <folder>/epoch_0003.pt     what is left of a save that was cut short: *.tmp
    <folder>/epoch_0003        with checkpoint_format="dcp": see dcp_state.py

Any backend can load it on any number of ranks. We read each file back before giving it
its final name. That way, you learn at once that a checkpoint can't be loaded, and not
after a crash.
"""

from __future__ import annotations

import io
import math
import os
import re
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distlab.comm._disk import is_url
from distlab.dcp import is_dcp, sync_folder
from distlab.engines import dcp_state
from distlab.engines.expect import EngineError

FORMAT = 1
KEYS = ("weights", "optimizer", "scaler", "rows", "losses", "num_steps", "spent_s")
_NAME = re.compile(r"epoch_(\d+)(\.pt)?", re.ASCII)


def save(folder: Path, epoch: int, state: dict[str, Any], kind: str = "pt") -> Path:
    """Write the checkpoint of `epoch` finished epochs completely, or not at all.

    Raises:
        EngineError: the file can't be written, or can't be read back.
    """
    path = folder / f"epoch_{epoch:04d}.pt"
    if kind == "dcp":
        dcp_state.save(path.with_suffix(""), epoch, plain(state))
        return path.with_suffix("")
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            torch.save({"format": FORMAT, "epoch": epoch, **plain(state)}, file)
            file.flush()
            os.fsync(file.fileno())
        _open(unfinished)
        unfinished.replace(path)
        sync_folder(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise EngineError(
            f"the checkpoint {path} cannot be written: {reason}"
        ) from error
    except Exception as error:
        raise EngineError(
            f"the checkpoint {path} could not be read back: {_why(error)}"
        ) from error
    finally:
        with suppress(OSError):
            unfinished.unlink()
    return path


def expect_folder(folder: Path) -> None:
    """Create the folder for checkpoints before the training begins.

    Raises:
        EngineError: the folder can't be created, or we can't write to it.
    """
    if is_url(folder):
        raise EngineError(
            f"checkpoint_dir {folder} is an address, not a folder: mount it, and name "
            "the folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise EngineError(
            f"checkpoint_dir {folder} cannot be created: {reason}"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise EngineError(f"checkpoint_dir {folder} cannot be written")


def expect_loadable(state: Any) -> None:
    """Check that a checkpoint can hold `state`, before the training begins.

    Raises:
        EngineError: the state has a value that we couldn't load again.
    """
    file = io.BytesIO()
    try:
        torch.save(plain(state), file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        raise EngineError(
            "the state of the optimizer or the model can't be saved in a checkpoint: "
            f"{_why(error)}"
        ) from error


def plain(value: Any) -> Any:
    """Replace numpy's numbers in a value with Python's."""
    if isinstance(value, np.number | np.bool_):
        return value.item()
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(one) for one in value)
    return value


def _why(error: Exception) -> str:
    """Name the type that torch won't load, or return the first line of the error."""
    text = str(error).strip()
    named = re.search(r"GLOBAL ([\w.]+)", text)
    if named:
        return f"{named[1]} is not plain data"
    return (text.splitlines() or [type(error).__name__])[0]


def load(source: bool | str | Path, folder: str | Path | None) -> dict[str, Any] | None:
    """Load the checkpoint to continue from; None if `folder` has none yet.

    If several trainings saved into `folder`, we take the one that began last, and from
    it the checkpoint with the most epochs, because later checkpoints of an earlier
    training may still be there. If that one is damaged, we take the one before it.
    "passed_over" has a line for each checkpoint that we skipped.

    Raises:
        EngineError: the named file doesn't exist or isn't a checkpoint; or `folder`
            can't be listed, or has checkpoints but none that can be loaded.
    """
    if source is False:
        return None
    if source is not True:
        return _read(Path(source))
    assert folder is not None
    passed_over: list[str] = []
    paths = saved_in(Path(folder))
    began = {path: _began(path) for path in paths}
    for path in sorted(paths, key=began.__getitem__, reverse=True):
        try:
            state = _read(path)
        except EngineError as error:
            passed_over.append(str(error))
            continue
        older = [
            f"{one} is of an earlier training"
            for one in paths[: paths.index(path)]
            if began[one] < began[path]
        ]
        return state | {"passed_over": passed_over + older}
    if passed_over:
        raise EngineError(
            f"no checkpoint in {folder} can be loaded: {'; '.join(passed_over)}; to "
            "start from the beginning, move them away"
        )
    return None


def _began(path: Path) -> float:
    """Return when a checkpoint's training began; one that can't be read comes first."""
    try:
        if is_dcp(path):
            return dcp_state.began(path)
        state = torch.load(path, "cpu", weights_only=True, mmap=True)
        return float(state.get("began", 0.0))
    except Exception:
        return math.inf


def saved_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, starting with the one with most epochs.

    Raises:
        EngineError: the folder can't be listed.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        if folder.is_symlink():
            raise EngineError(
                f"{folder} is a link to a folder that does not exist"
            ) from None
        return []
    except OSError as error:
        raise EngineError(
            f"the checkpoints in {folder} cannot be listed: {error.strerror}"
        ) from error
    epochs = {
        name: int(m[1])
        for name in names
        if (m := _NAME.fullmatch(name)) and (m[2] or is_dcp(folder / name))
    }
    return [folder / name for name in sorted(epochs, key=epochs.__getitem__)[::-1]]


def _read(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return dcp_state.load(path)
    try:
        state = _open(path)
    except FileNotFoundError as error:
        is_lost = path.is_symlink()
        what = (
            f"{path} is a link to a file that does not exist"
            if is_lost
            else f"there is no checkpoint {path}"
        )
        raise EngineError(what) from error
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise EngineError(f"{path} cannot be read: {why}") from error
    except Exception as error:
        raise EngineError(f"{path} is damaged or not a checkpoint") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise EngineError(f"{path} is not a checkpoint of distlab's engines")
    return state


def _open(path: Path) -> Any:
    """Load a file of torch.save and verify its checksums, which torch doesn't do."""
    with path.open("rb") as file:
        with zipfile.ZipFile(file) as archive:  # rejects torch's older format
            changed = archive.testzip()
        if changed:
            raise ValueError(f"{changed} has changed")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
