"""The folder in which a process that plays ranks may do as it likes."""

from __future__ import annotations

import os

_SHARED: list[str] = []


def share(folder: str) -> None:
    """From now on it is `folder`, in which every simulated rank has one of its own."""
    _SHARED[:] = [os.path.realpath(folder)]


def own_folder() -> str:
    """Return its real path: the working folder, unless ranks share this process."""
    return _SHARED[0] if _SHARED else os.path.realpath(os.getcwd())
