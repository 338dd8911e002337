"""An end for what hangs in this very process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def no_longer_than(seconds: float, sentence: str) -> Iterator[None]:
    """Have it raise TimeoutError with this sentence; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals do not come to others
        return

    def give_up(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(sentence)

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
