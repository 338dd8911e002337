"""Ctrl-C before the ranks are there: one line, and exit code 130."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator

from distlab.launch.report import interrupted
from distlab.launch.streams import tell


def stopped() -> int:
    """Say that Ctrl-C was heard, and give the exit code for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second one
    code = 128 + signal.SIGINT
    tell(sys.stderr, interrupted(signal.SIGINT, code))
    return code


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Ctrl-C ends this process meanwhile, which has started nothing.

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
