"""The folder that the ranks of one process share, if they're simulated."""

from __future__ import annotations

import os

_SHARED: list[str] = []


def share(folder: str) -> None:
    """From now on this process may do in `folder` as it likes.

    Each simulated rank has a folder of its own in it.
    """
    _SHARED[:] = [os.path.realpath(folder)]


def shared_folder() -> str:
    """Return its real path; empty where a rank has this process to itself."""
    return _SHARED[0] if _SHARED else ""
