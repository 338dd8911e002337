"""The process that has torch imported and forks ranks from itself; see boot.py.

It never starts a thread, because a fork copies only the thread that calls it. It
listens on one socket (requests come with the ranks' file descriptors attached); when
that socket closes, for whatever reason, it ends every process below it and itself.

Source: the idea is Android's zygote; here it turns 4.4 s for 4 spawned ranks into 0.1.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  each rank would import it, to find a host
import gc
import os
import selectors
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from distlab.runner import rank as rank_process
from distlab.runner import service as service_process
from distlab.runner.huge_pages import moves_to_huge_pages
from distlab.runner.processes import become_subreaper, end_descendants, end_sessions
from distlab.runner.wire import decode, encode
from distlab.runner.zygote_protocol import HEADER

_IDLE_S = 0.005
_ALL_MOVED = object()


class Zygote:
    """Serves one parent until its socket closes."""

    def __init__(self, parent: socket.socket) -> None:
        self._parent = parent
        self._ranks: set[int] = set()
        self._job: dict[str, Any] = {}
        self._folder: str | None = None  # of the last run; its parent removes it
        self._moves: Iterator[None] | None = moves_to_huge_pages()
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_read, False)
        os.set_blocking(self._wakeup_write, False)

    def serve(self) -> None:
        """Handle requests and deaths until the parent is gone."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what it means
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(self._parent, selectors.EVENT_READ)
        selector.register(self._wakeup_read, selectors.EVENT_READ)
        self._tell({"k": "zygote", "threads": num_threads()})
        while True:
            events = selector.select(_IDLE_S if self._moves is not None else None)
            if not events:
                self._move()
            for key, _ in events:
                if key.fileobj is self._parent:
                    request, descriptors = self._receive()
                    self._handle(request, descriptors)
                else:
                    self._bury()

    def _move(self) -> None:
        """Make the next fork cheaper, while there is nothing else to do."""
        assert self._moves is not None
        if next(self._moves, _ALL_MOVED) is _ALL_MOVED:
            self._moves = None

    def _handle(self, request: dict[str, Any], descriptors: list[int]) -> None:
        if request["k"] == "start":
            self._start(request, descriptors)
        elif request["k"] == "again":
            self._start_again(request, descriptors)
        elif request["k"] == "signal":
            # Nobody but us collects it: until then its number is no other process's.
            if request["pid"] in self._ranks:
                os.kill(request["pid"], request["signal"])
        elif request["k"] == "preload":
            _preload(request["modules"])
            self._moves = moves_to_huge_pages()
            self._tell({"k": "preloaded", "threads": num_threads()})
        elif request["k"] == "end":
            end_descendants()
            self._bury()
            self._ranks.clear()
            self._tell({"k": "ended"})

    def _start(self, job: dict[str, Any], descriptors: list[int]) -> None:
        self._job, self._folder = job, job["folder"]
        count = job["world_size"] + len(job["services"])
        pids = [self._fork(job, number, count, descriptors) for number in range(count)]
        for descriptor in descriptors:
            os.close(descriptor)
        self._tell({"k": "started", "pids": pids})

    def _start_again(self, request: dict[str, Any], descriptors: list[int]) -> None:
        # What the dead one forked may still hold its listener.
        end_sessions({request["pid"]})
        job = {**self._job, "lives": request["lives"]}
        number = request["number"]
        pid = self._fork(job, number, 1, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._tell({"k": "again", "number": number, "pid": pid})

    def _fork(
        self, job: dict[str, Any], number: int, count: int, descriptors: list[int]
    ) -> int:
        """Fork a process; of `count` controls, outputs, listeners it gets its own."""
        pid = os.fork()
        if pid == 0:
            self._become(job, number, number % count, count, descriptors)
        self._ranks.add(pid)
        return pid

    def _become(
        self,
        job: dict[str, Any],
        number: int,
        place: int,
        count: int,
        descriptors: list[int],
    ) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self._wakeup_read)
        os.close(self._wakeup_write)
        self._parent.close()
        for other, descriptor in enumerate(descriptors):
            if other % count != place:
                os.close(descriptor)
        control, output, listener = descriptors[place::count]
        live = rank_process.live if number < job["world_size"] else service_process.live
        live(
            job,
            number,
            socket.socket(fileno=control),
            output,
            socket.socket(fileno=listener),
        )

    def _bury(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup_read, 4096)
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid in self._ranks:
                    self._ranks.discard(pid)
                    self._tell({"k": "exit", "pid": pid, "status": status})

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        try:
            head, descriptors, _, _ = socket.recv_fds(self._parent, HEADER.size, 256)
        except ConnectionResetError:  # it was killed before it had read all we told it
            self._leave()
        if len(head) < HEADER.size:
            self._leave()
        length, _count = HEADER.unpack(head)
        body = b""
        while len(body) < length:
            piece = self._parent.recv(length - len(body))
            if not piece:
                self._leave()
            body += piece
        return decode(body), descriptors

    def _leave(self) -> NoReturn:
        end_descendants()
        # The parent may have been killed, during a run or between two of them.
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)

    def _tell(self, message: dict[str, Any]) -> None:
        try:
            self._parent.sendall(encode(message))
        except OSError:
            self._leave()


def num_threads() -> int:
    """How many threads this process has (1 where /proc does not tell)."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 1


def _preload(modules: list[str]) -> None:
    rank_process.import_all(modules)
    gc.collect()
    gc.freeze()  # keep the collector from touching, and so copying, shared pages


def main(arguments: list[str]) -> None:
    """Serve the parent: `arguments` are its file descriptor and what to import."""
    become_subreaper()
    parent = socket.socket(fileno=int(arguments[0]))
    _preload(arguments[1:])
    Zygote(parent).serve()
