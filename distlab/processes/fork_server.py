"""A process that imports what many others need, and forks them from itself.

How this works:

    parent ── requests, descriptors ──▶ ForkServer ── fork() ──▶ a process, as it is now
           ◀── replies, ends ──────────      ▲                        │
                                             └──── SIGCHLD, status ───┘

The server doesn't start any threads, because fork() copies only the calling thread. It
waits for a request, or for a signal that a child has ended. When the parent's socket
closes, for whatever reason, the server kills all of its descendants and exits.

A subclass knows its protocol and what a child becomes: `runner.zygote` forks the ranks
of a run, and `launch.forker` the processes that run a user's script.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
from collections.abc import Sequence
from typing import Any, NoReturn

from distlab.processes.tree import end_descendants


def import_all(names: Sequence[str]) -> None:
    """Import modules; of "module:function", also call the function."""
    for name in names:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()


def preload(names: Sequence[str]) -> None:
    """Import all of these for the processes that will be forked.

    The garbage collector leaves alone what exists then. Otherwise, it would write to
    pages of memory that those processes share, and the kernel would copy them.
    """
    import_all(names)
    gc.collect()
    gc.freeze()


class ForkServer:
    """Serves one parent until its socket closes."""

    idle_s: float | None = None
    """After so many quiet seconds, `idle` is called; None means never."""

    def __init__(self, parent: socket.socket) -> None:
        self.parent = parent
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)

    def serve(self) -> Any:
        """Handle requests and ends; only a forked process returns, see `handle`."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(self.parent, selectors.EVENT_READ)
        selector.register(self._woken, selectors.EVENT_READ)
        self.tell(self.greeting())
        while True:
            events = selector.select(self.idle_s)
            if not events:
                self.idle()
            for key, _ in events:
                if key.fileobj is not self.parent:
                    self.collect()
                elif (task := self.handle()) is not None:
                    selector.close()
                    return task

    def greeting(self) -> bytes:
        """Return what the parent is told when forks are possible."""
        raise NotImplementedError

    def handle(self) -> Any:
        """Read a request and do it; None, but in a forked process what it has to do."""
        raise NotImplementedError

    def ended(self, pid: int, status: int) -> None:
        """Take note that a child has ended, with the status that waitpid gives."""
        raise NotImplementedError

    def idle(self) -> None:
        """Use the time in which nothing is asked for."""

    def left(self) -> None:
        """Tidy up when the parent is gone and every child has been ended."""

    def fork(self) -> int:
        """Fork; the child gets 0, and has none of what belongs to the server."""
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.parent.close()
            os.close(self._woken)
            os.close(self._wake)
        return pid

    def collect(self) -> None:
        """Collect the children that have ended. Until then, their pids stay theirs."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                self.ended(pid, status)

    def tell(self, message: bytes) -> None:
        """Send the parent a message, or leave if it is gone."""
        try:
            self.parent.sendall(message)
        except OSError:
            self.leave()

    def leave(self) -> NoReturn:
        """End every process below this one, and this one."""
        end_descendants()
        self.left()
        os._exit(0)
