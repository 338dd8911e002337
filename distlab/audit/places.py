"""The line of the user's own code that is running, however deep torch is below it."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from distlab.paths import is_users_code


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


@functools.cache
def real_file(file: str) -> str:
    """Return the path of a file, however the script came to it."""
    return str(Path(file).resolve())


def here() -> Place | None:
    """Return the innermost line of the user's code on this thread's stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users_code(frame.f_code.co_filename):
            return Place(real_file(frame.f_code.co_filename), frame.f_lineno)
        frame = frame.f_back
    return None
