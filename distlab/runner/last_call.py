"""The call that a rank is in, where no journal is kept: one line of memory.

A rank writes the number and the name of each call into a small file that is mapped
into its memory: a microsecond, where a journal takes a hundred. The parent reads it
when nothing moves any more; the rank's stack says the line.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from distlab.comm import Event
from distlab.runner import stacks

_FORM = struct.Struct("<Qd24s")  # the call's number, when it began, its name


class LastCall:
    """Called with a name where a call begins, and with "" where it has ended."""

    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            file.truncate(_FORM.size)
            self._memory = mmap.mmap(file.fileno(), _FORM.size)
        self._number = 0

    def __call__(self, op: str, now_s: float) -> None:
        """Note it; what is there of the call before is written over."""
        self._number += bool(op)
        _FORM.pack_into(self._memory, 0, self._number, now_s, op.encode())


def path_of(folder: Path, rank: int) -> Path:
    """Where `rank` notes its calls."""
    return folder / f"call{rank}"


def read_call(path: Path, at: tuple[str, int] | None) -> Event | None:
    """The call that a rank is in, as a journal has it; None where it is in none.

    `at` is the file and line that it was made in.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | stacks.NOT_WAITING)
    except OSError:
        return None
    try:
        data = os.read(descriptor, _FORM.size)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    if len(data) != _FORM.size:
        return None
    number, began_s, name = _FORM.unpack(data)
    op = name.rstrip(b"\0").decode(errors="replace")
    if not op:
        return None
    file, line = at or ("", 0)
    place = {"file": file, "line": line, "via": None}
    return {"k": "enter", "n": number, "op": op, "t": began_s, **place}
