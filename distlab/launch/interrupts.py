"""Answer Ctrl-C before there are ranks, with one line and exit code 130."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from distlab.launch.report import interrupted
from distlab.launch.streams import tell


def stopped() -> int:
    """Report that we got the Ctrl-C, and return its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second one
    code = 128 + signal.SIGINT
    tell(sys.stderr, interrupted(signal.SIGINT, code))
    return code


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end this process in this block, before it has started anything.

    While torch is imported, a KeyboardInterrupt can get lost in its C code.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # nohup, say
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(stopped()))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
