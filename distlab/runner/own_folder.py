"""The folder of a process that plays ranks, and its end if the parent was killed."""

from __future__ import annotations

import os
import shutil
import time

_PATIENCE_S, _PAUSE_S = 5.0, 0.05
_SHARED: list[str] = []


def share(folder: str) -> None:
    """From now on this process may do in `folder` as it likes.

    Each simulated rank has a folder of its own in it.
    """
    _SHARED[:] = [os.path.realpath(folder)]


def shared_folder() -> str:
    """Return its real path; empty where a rank has this process to itself."""
    return _SHARED[0] if _SHARED else ""


def remove(folder: str) -> None:
    """Leave `folder` and remove it; others that are about to end may still write there.

    The guard lets a process change nothing outside its folder, so it becomes ours.
    """
    share(folder)
    os.chdir(os.path.dirname(folder))  # one can't remove the folder one is in
    until_s = time.monotonic() + _PATIENCE_S
    while os.path.isdir(folder) and time.monotonic() < until_s:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(_PAUSE_S)
