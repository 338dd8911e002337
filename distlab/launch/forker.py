"""Import torch once, then fork processes that run the script.

    python -m distlab.launch.forker SOCKET JOB MODULE …      (SOCKET, JOB: descriptors)

The forker creates no group, so that the forked processes can. Its requests and replies
are documented in `forked`.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distlab.launch.control import CONTROL
from distlab.launch.pages import PAGE
from distlab.launch.records import ERROR_FILE
from distlab.processes.fork_server import ForkServer, preload
from distlab.processes.tree import become_subreaper, die_with_parent, is_stopped

PACKET = 1 << 18
AGENTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that this process ignores, because the agent decides what they mean."""


Handlers = Mapping[int, Any]
"""A process's reaction to a signal, as `signal.signal` takes and returns it."""


@dataclass(frozen=True, kw_only=True)
class ForkedJob:
    """The program that a forked process should run."""

    program: list[str]
    run_as: str  # "script", "module" or "path", see LaunchConfig
    environment: dict[str, str]


class Forker(ForkServer):
    """Forks the processes of one agent; in each of them, `serve` returns its job."""

    def __init__(
        self, agent: socket.socket, job: ForkedJob, handlers: Handlers
    ) -> None:
        super().__init__(agent)
        self._job, self._handlers = job, handlers
        self._numbers: dict[int, int] = {}  # of the processes, by pid

    def greeting(self) -> bytes:
        """Return what the agent is told when forks are possible."""
        return json.dumps({"up": os.getpid()}).encode()

    def handle(self) -> ForkedJob | None:
        """Read a request and do it; in a forked process, return its job."""
        packet, descriptors, _, _ = socket.recv_fds(self.parent, PACKET, 8)
        if not packet:
            self.leave()
        request = json.loads(packet)
        if "signal" in request:
            self._signal(request["number"], request["signal"])
            return None
        # One that comes before the child has taken its own handlers is not lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, AGENTS)
        pid = self.fork()
        if pid == 0:
            return self._become(request, descriptors)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, AGENTS)
        for descriptor in descriptors:
            os.close(descriptor)
        self._numbers[pid] = request["number"]
        self._tell({"started": request["number"], "pid": pid})
        return None

    def _signal(self, number: int, which: int) -> None:
        # Until we collect it, its pid is no other process's.
        for pid, own in self._numbers.items():
            if own == number:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, which)
                    if which != signal.SIGKILL and is_stopped(pid):
                        os.kill(pid, signal.SIGCONT)

    def _become(self, request: dict[str, Any], descriptors: list[int]) -> ForkedJob:
        for number, handler in self._handlers.items():  # under nohup one is ignored
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, AGENTS)
        os.setsid()  # Ctrl-C reaches the agent only
        die_with_parent()
        control, log, page = descriptors
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(null)
        os.close(log)
        own = {CONTROL: str(control), PAGE: str(page)}
        own[ERROR_FILE] = request["error_file"]
        return replace(self._job, environment=self._job.environment | own)

    def ended(self, pid: int, status: int) -> None:
        """Report the end of a process that the agent has asked for."""
        number = self._numbers.pop(pid, None)
        if number is not None:
            self._tell({"ended": number, "code": os.waitstatus_to_exitcode(status)})

    def _tell(self, words: dict[str, Any]) -> None:
        self.tell(json.dumps(words).encode())


def run(job: ForkedJob) -> None:
    """Run the script as its own program."""
    os.environ.clear()
    os.environ.update(job.environment)
    sys.argv[:] = job.program
    script = job.program[0]
    if job.run_as == "module":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    if job.run_as == "script":
        sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def main(arguments: list[str], handlers: Handlers) -> None:
    """Import the modules, then fork; each forked process runs the script.

    The forked process begins with these `handlers` of AGENTS.
    """
    become_subreaper()
    die_with_parent()
    descriptor, job_file, *modules = arguments
    with open(int(job_file), "rb") as file:
        job = ForkedJob(**json.load(file))
    preload(modules)
    run(Forker(socket.socket(fileno=int(descriptor)), job, handlers).serve())
