"""Save the final weights of `distlab ddp` for `torch.load(…, weights_only=True)`.

The file is only a state_dict, so you don't need any of our classes to read it, and it
contains no code that could run.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.nn.utils import vector_to_parameters

from distlab.training.ddp import DdpResult
from distlab.training.ddp_data import make_model


def save_model(result: DdpResult, path: Path) -> None:
    """Write rank 0's weights to `path`, replacing an existing file only at the end.

    Raises:
        OSError: the file can't be written; an existing one is unchanged.
    """
    model = make_model(result.config)
    vector_to_parameters(result.weights[0], model.parameters())
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as file:
            torch.save(model.state_dict(), file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def require_writable(path: Path) -> None:
    """Check that we can write `path`, before minutes of training.

    Raises:
        ValueError: we can't write a file at `path`; the message says why.
    """
    folder = path.resolve().parent
    if path.is_dir():
        raise ValueError(f"--save {path} is a folder: name a file")
    if not folder.is_dir():
        raise ValueError(f"--save {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise ValueError(f"--save {path}: {folder} cannot be written")
