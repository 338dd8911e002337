"""Where a rank was when it hung or crashed: written by the rank, read by the parent."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import stat
from pathlib import Path

_MOST_BYTES = 1 << 16  # Python writes at most 100 frames
_FRAME = re.compile(r'File "(.+)", line (\d{1,9})\b')
# Windows has no pipes and no links in the place of a file that we would have to fear.
NOT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
_KEPT_OPEN: list[object] = []


ASKS_FOR_STACK: int | None = getattr(signal, "SIGUSR1", None)
"""The signal at which a process writes its stack, on a system that has it."""


def write_to(path: Path, limit_s: float) -> None:
    """From now on this process writes its stack there: when asked, or if it crashes.

    Of the thread concerned only: a thread of the transport that ends the process has
    no place in the program. Where no signal can ask, it writes the stacks of all its
    threads after `limit_s` seconds.
    """
    file = path.open("w", encoding="utf-8")
    _KEPT_OPEN.append(file)
    if ASKS_FOR_STACK is not None:
        faulthandler.register(ASKS_FOR_STACK, file=file, all_threads=False)
    else:
        faulthandler.dump_traceback_later(limit_s, file=file)
    faulthandler.enable(file=file, all_threads=False)


def read_from(path: Path) -> tuple[tuple[str, int], ...]:
    """The (file, line) of each frame, outermost first; nothing if nothing can be had.

    The program may have put anything there: a pipe is not waited for, a link not
    followed, and a file without end not read to it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | NOT_WAITING)
    except OSError:
        return ()
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ()
        text = os.read(descriptor, _MOST_BYTES).decode(errors="replace")
    except OSError:
        return ()
    finally:
        os.close(descriptor)
    return tuple((file, int(line)) for file, line in reversed(_FRAME.findall(text)))
