"""Write to stdout and stderr in a way that a full disk or lost reader ends no rank."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TextIO

TERMINAL = "distlab terminal"  # the thread that shows what ranks print


def tell(stream: TextIO | None, text: str) -> None:
    """Write and flush, and drop everything that we can't write.

    If a stream was closed before Python started, Python has None in its place.
    """
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            stream.write(text)
            stream.flush()


def is_stuck() -> bool:
    """Return True if the terminal's thread still waits, so that a flush would block."""
    return any(thread.name == TERMINAL for thread in threading.enumerate())


def let_go(stream: TextIO | None) -> None:
    """Flush for the last time, and drop the rest, because we can't write it.

    Otherwise Python would flush once more as it ends, and an error there would change
    the exit code.
    """
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
