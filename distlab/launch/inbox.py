"""Queue everything that happens: ends of ranks, signals, messages of other nodes."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from distlab.given.process_group import Interrupted

_ALWAYS = ("SIGINT", "SIGTERM", "SIGHUP")


class Inbox:
    """A queue that the agent reads from time to time, or at once after a signal."""

    def __init__(self, signals: Sequence[str] = ()) -> None:
        """Open the queue.

        `signals` names the signals that stop the job, besides the usual three.
        """
        self._numbers = [getattr(signal, name) for name in {*_ALWAYS, *signals}]
        self.queue: SimpleQueue[object] = SimpleQueue()  # a signal handler may put
        self.num_interrupts = 0
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)

    def put(self, event: object) -> None:
        """Add an event and end a wait, from any thread."""
        self.queue.put(event)
        self.wake()

    def take(self) -> list[object]:
        """Take everything from the queue, in the order in which it happened."""
        found = []
        with contextlib.suppress(Empty):
            while True:
                found.append(self.queue.get_nowait())
        return found

    def wait(self, seconds: float) -> None:
        """Wait for this long; a signal ends the wait."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            if select.select([self._woken], [], [], left_s)[0]:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
                return

    def wait_beside(
        self, sockets: Sequence[socket.socket], seconds: float
    ) -> list[socket.socket]:
        """Wait for this long, a signal or a socket; return the readable sockets."""
        waiting: list[Any] = [self._woken, *sockets]
        readable = select.select(waiting, [], [], max(0.0, seconds))[0]
        if self._woken in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
        return [one for one in sockets if one in readable]

    def wake(self) -> None:
        """End a wait, from any thread."""
        with contextlib.suppress(OSError):  # it is full, or closed
            os.write(self._wake, b"x")

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Turn SIGINT, SIGTERM, SIGHUP and the others into Interrupted in this block.

        In other threads this does nothing, because Python handles signals in the main
        one.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {}
        for number in self._numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, say
                before[number] = signal.signal(number, self._interrupted)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Close the pipe."""
        wake, self._wake = self._wake, -1
        os.close(self._woken)
        os.close(wake)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        self.num_interrupts += 1
        self.queue.put(Interrupted(number))
        self.wake()
