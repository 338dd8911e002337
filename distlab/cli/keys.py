"""Keys as they are pressed, without Enter."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def pressed_keys() -> Iterator[Callable[[], str]]:
    """Yield a function that returns the last key pressed, or "", without waiting.

    If standard input isn't a terminal, the function always returns "".
    """
    if not sys.stdin.isatty():
        yield lambda: ""
        return
    if sys.platform == "win32":
        import msvcrt

        yield lambda: msvcrt.getwch() if msvcrt.kbhit() else ""
        return
    try:
        import select
        import termios
        import tty
    except ImportError:
        yield lambda: ""
        return

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed() -> str:
        ready, _, _ = select.select([descriptor], [], [], 0)
        # Not sys.stdin.read: it would keep a second key where select cannot see it.
        return os.read(descriptor, 1).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
