"""The process that has torch imported and forks ranks from itself; see boot.py.

Requests come with the ranks' file descriptors attached; zygote_protocol.py lists them.

Source: the idea is Android's zygote; here it turns 4.4 s for 4 spawned ranks into 0.1.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  each rank would import it, to find a host
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distlab.processes.fork_server import ForkServer, preload
from distlab.processes.tree import become_subreaper, end_descendants, end_sessions
from distlab.runner import rank as rank_process
from distlab.runner import service as service_process
from distlab.runner.huge_pages import moves_to_huge_pages
from distlab.runner.wire import decode, encode
from distlab.runner.zygote_protocol import HEADER
from distlab.transports import load_ours

_IDLE_S = 0.005
_ALL_MOVED = object()


class Zygote(ForkServer):
    """Forks the ranks and services of one run after the other."""

    idle_s: float | None = _IDLE_S

    def __init__(self, parent: socket.socket) -> None:
        super().__init__(parent)
        self._ranks: set[int] = set()
        self._job: dict[str, Any] = {}
        self._folder: str | None = None  # of the last run; its parent removes it
        self._moves: Iterator[None] = moves_to_huge_pages()

    def greeting(self) -> bytes:
        """Return what the parent is told when runs are possible."""
        return encode({"k": "zygote", "threads": num_threads()})

    def idle(self) -> None:
        """Make the next fork cheaper, while there is nothing else to do."""
        if next(self._moves, _ALL_MOVED) is _ALL_MOVED:
            self.idle_s = None

    def handle(self) -> None:
        """Read a request and do it."""
        request, descriptors = self._receive()
        if request["k"] == "start":
            self._start(request, descriptors)
        elif request["k"] == "again":
            self._start_again(request, descriptors)
        elif request["k"] == "signal":
            # Nobody but us collects it: until then its number is no other process's.
            if request["pid"] in self._ranks:
                os.kill(request["pid"], request["signal"])
        elif request["k"] == "preload":
            preload(request["modules"])
            self._moves, self.idle_s = moves_to_huge_pages(), _IDLE_S
            self._tell({"k": "preloaded", "threads": num_threads()})
        elif request["k"] == "end":
            end_descendants()
            self.collect()
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
        pid = self.fork()
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

    def ended(self, pid: int, status: int) -> None:
        """Report the end of a rank or a service, but not of what they started."""
        if pid in self._ranks:
            self._ranks.discard(pid)
            self._tell({"k": "exit", "pid": pid, "status": status})

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        try:
            head, descriptors, _, _ = socket.recv_fds(self.parent, HEADER.size, 256)
        except ConnectionResetError:  # it was killed before it had read all we told it
            self.leave()
        if len(head) < HEADER.size:
            self.leave()
        length, _count = HEADER.unpack(head)
        body = b""
        while len(body) < length:
            piece = self.parent.recv(length - len(body))
            if not piece:
                self.leave()
            body += piece
        return decode(body), descriptors

    def left(self) -> None:
        """Remove the folder of a run whose parent was killed, in it or after it."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _tell(self, message: dict[str, Any]) -> None:
        self.tell(encode(message))


def num_threads() -> int:
    """How many threads this process has (1 where /proc does not tell)."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else 1


def main(arguments: list[str]) -> None:
    """Serve the parent: `arguments` are its file descriptor and what to import."""
    become_subreaper()
    parent = socket.socket(fileno=int(arguments[0]))
    load_ours()
    preload(arguments[1:])
    Zygote(parent).serve()
