"""Tell the user's frames from those of torch, the standard library and ours."""

from __future__ import annotations

import os
from types import CodeType, FrameType

from distlab.paths import is_users_code

Place = tuple[str, int]
"""A file and a line."""

MOST_FRAMES = 64


def is_users(code: CodeType) -> bool:
    """Return True for code that is neither a library's nor ours."""
    return is_users_code(code.co_filename)


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
