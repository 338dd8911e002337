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
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "setitimer"):
        yield  # signals do not come to others, and on Windows there is no such one
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
