"""Start, signal and listen to the processes that `forker` forks for one agent."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distlab.launch import control, forker
from distlab.launch.config import LaunchError
from distlab.processes.tree import end_descendants

PRELOADED = ("torch", "distlab.distributed")
# A signal to the whole group of processes is the agent's to answer, from the start.
_PROGRAM = f"""\
import signal, sys
before = {{number: signal.signal(number, signal.SIG_IGN)
          for number in {tuple(map(int, forker.AGENTS))}}}
signal.pthread_sigmask(signal.SIG_SETMASK, ())
from {forker.__name__} import main
main(sys.argv[1:], before)
"""
_START_S = 120.0  # to import them


@dataclass(frozen=True)
class Exited:
    """The process with this number has ended; the code is -s after signal s."""

    number: int
    code: int


@dataclass(frozen=True)
class Heard:
    """A message from a process."""

    number: int
    words: control.Words


class Forked:
    """Processes that run one script; their numbers are never reused."""

    def __init__(
        self,
        program: Sequence[str],
        environment: Mapping[str, str],
        *,
        run_as: str = "script",
        preloaded: Sequence[str] = PRELOADED,
    ) -> None:
        """Start the forker, which imports `preloaded` in the background.

        Raises:
            LaunchError: the system can't start the process.
        """
        self._ends: dict[int, socket.socket] = {}
        self._pids: dict[int, int] = {}
        self._socket, theirs = control.pair()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, forker.AGENTS)
        job = {"program": [*program], "run_as": run_as, "environment": {**environment}}
        try:
            # We pass a file, because an environment may be too large for a packet.
            with theirs, tempfile.TemporaryFile() as file:
                file.write(json.dumps(job).encode())
                file.seek(0)
                descriptors = [theirs.fileno(), file.fileno()]
                self._forker = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-c", _PROGRAM),
                        *(*map(str, descriptors), *preloaded),
                    ],
                    pass_fds=descriptors,
                    env={**environment, "PYTHONPATH": _python_path(environment)},
                    stdin=subprocess.DEVNULL,
                )
        except OSError as error:
            reason = error.strerror or str(error)
            raise LaunchError(f"the ranks can't be started: {reason}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def wait(self) -> None:
        """Wait until we can fork processes.

        Raises:
            LaunchError: the forker doesn't start.
        """
        self._socket.settimeout(_START_S)
        if control.receive(self._socket) is None:
            raise LaunchError("the process that forks the ranks did not come up")
        self._socket.settimeout(None)

    @property
    def sockets(self) -> list[socket.socket]:
        """Return the sockets that become readable when there is something to read."""
        return [self._socket, *self._ends.values()]

    def start(self, number: int, log: int, page: int, error_file: str) -> None:
        """Start a process whose output goes to the descriptor `log`."""
        ours, theirs = control.pair()
        request = {"number": number, "error_file": error_file}
        with theirs:
            packet = json.dumps(request).encode()
            socket.send_fds(self._socket, [packet], [theirs.fileno(), log, page])
        self._ends[number] = ours

    def pid(self, number: int) -> int | None:
        """Return a process's id once it runs."""
        return self._pids.get(number)

    def tell(self, number: int, **words: object) -> None:
        """Send a message to a process."""
        if number in self._ends:
            control.send(self._ends[number], words)

    def signal(self, number: int, which: int) -> None:
        """Send a signal to a process, if it runs."""
        control.send(self._socket, {"number": number, "signal": which})

    def take(self, readable: Sequence[socket.socket]) -> Iterator[Exited | Heard]:
        """Yield the messages and ends that these sockets report.

        Raises:
            LaunchError: the forker has ended.
        """
        for number, end in list(self._ends.items()):
            if end in readable:
                words = control.receive(end)
                if words is None:  # its end is closed: Exited follows
                    self._ends.pop(number).close()
                else:
                    yield Heard(number, words)
        if self._socket in readable:
            words = control.receive(self._socket)
            if words is None:
                raise LaunchError("the process that forks the ranks has ended")
            if "pid" in words:
                self._pids[words["started"]] = words["pid"]
            if "ended" in words:
                self._pids.pop(words["ended"], None)
                yield Exited(words["ended"], words["code"])

    def receive(self, limit_s: float) -> list[Exited | Heard]:
        """Wait for messages and ends, `limit_s` seconds at most.

        Raises:
            LaunchError: the forker has ended.
        """
        with selectors.DefaultSelector() as selector:
            for end in self.sockets:
                selector.register(end, selectors.EVENT_READ)
            readable = [key.fileobj for key, _ in selector.select(limit_s)]
        return list(self.take(readable))  # type: ignore[arg-type]

    def sweep(self) -> None:
        """End whatever the processes have started and left behind."""
        end_descendants(self._forker.pid)

    def close(self) -> None:
        """End the forker and everything that it has forked."""
        self._socket.close()
        for end in self._ends.values():
            end.close()
        try:
            self._forker.wait(10.0)
        except subprocess.TimeoutExpired:
            self._forker.kill()
            self._forker.wait()


def _python_path(environment: Mapping[str, str]) -> str:
    """Return the user's PYTHONPATH with distlab's folder in front."""
    root = str(Path(__file__).parents[2])
    given = environment.get("PYTHONPATH", "")
    return os.pathsep.join(filter(None, (root, given)))
