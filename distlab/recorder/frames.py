"""Tell the user's frames from those of torch, the standard library and ours."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

Place = tuple[str, int]
"""A file and a line."""

MOST_FRAMES = 64
_OURS = (str(Path(__file__).parents[1]) + os.sep,)
_LIBRARIES = tuple(
    {os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")}
)
_is_users: dict[CodeType, bool] = {}


def is_users(code: CodeType) -> bool:
    """Return True for code that is neither a library's nor ours."""
    known = _is_users.get(code)
    if known is None:
        file = code.co_filename
        known = not (
            file.startswith(("<", *_OURS, *_LIBRARIES)) or "site-packages" in file
        )
        _is_users[code] = known
    return known


def place_of(frame: FrameType | None) -> Place | None:
    """Return the innermost place in the user's own code, counted from `frame`."""
    while frame is not None:
        if is_users(frame.f_code):
            return os.path.abspath(frame.f_code.co_filename), frame.f_lineno
        frame = frame.f_back
    return None


def stack_of(frame: FrameType | None) -> list[tuple[str, int, str]]:
    """Return file, line and function of each frame, innermost first."""
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < MOST_FRAMES:
        code = frame.f_code
        found.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return found
