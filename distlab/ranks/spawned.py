"""A cluster of real processes for systems on which we can't fork, such as macOS.

Each rank is a Python process of its own, which we start by spawning, not by forking.
Since importing torch takes a second, we start them ahead of time and keep them warm:

    ours (SpawnedCluster)                       one process per rank (spawned_rank.py)
      start it                        ─────▶    connect to us, import torch, and say
                                      ◀─────    where it can be called; wait
      a run: send each its job        ─────▶    be that rank; the journal, reports and
      Supervisor, as for forked ranks ◀─────    the result come back on the connection
      kill it, start another          ─────▶

A process is used for one run only, so nothing reaches the next run, and the verdicts
are those of forked ranks. On macOS and elsewhere, several things that we do on Linux
aren't possible; docs/getting-started.md lists them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from distlab.ranks.apart import NotHereError, apart, end, status_of
from distlab.runner import surroundings
from distlab.runner.cluster import (
    BOOT,
    START_LIMIT_S,
    Cluster,
    check_world_size,
    job_of,
)
from distlab.runner.doors import Door
from distlab.runner.limits import Limits
from distlab.runner.orders import Orders
from distlab.runner.posts import Post
from distlab.runner.record import Run, RunnerError
from distlab.runner.staff import ServiceSpec
from distlab.runner.wire import decode, encode

RANK = "distlab.ranks.spawned_rank"
_FEWEST_WARM, _MOST_WARM = 2, 8  # processes that wait for the next run


class SpawnedCluster(Cluster):
    """Spawned processes behind the methods of `Cluster`, one run at a time."""

    def __init__(self, *, preload: tuple[str, ...] = ()) -> None:
        super().__init__(preload=preload)
        self._reception: _Reception | None = None
        self._warm: list[_Warm] = []
        self._wanted = _FEWEST_WARM
        self._home: Path | None = None
        self._num_runs = 0

    def start(self, *, wait: bool = True) -> None:
        """See `Cluster.start`."""
        if self._home is None:
            self._home = Path(tempfile.mkdtemp(prefix="distlab-"))
            self._reception = _Reception()
            atexit.register(self.close)
        self._start_more(self._wanted)
        if wait:
            for one in self._warm:
                one.ready()

    def warm(self, *modules: str) -> None:
        """See `Cluster.warm`."""
        new = [name for name in modules if name not in self._preload]
        self._preload += new
        for one in self._warm:
            one.preload(new)

    def run(
        self,
        program: Callable[..., Any],
        world_size: int,
        *args: Any,
        limits: Limits | None = None,
        on_report: Callable[[int, Any], None] | None = None,
        seed: int = 0,
        backend: str = "gloo",
        journal: bool = True,
        last_call: bool = False,
        services: Mapping[str, ServiceSpec] | None = None,
        may_die: Collection[int | str] = (),
        max_frame_bytes: int = 1 << 20,
        ranks_per_node: int = 0,
    ) -> Run:
        """Run `program(context, *args)` on spawned ranks; see `Cluster.run`.

        Raises:
            NotHereError: it needs services, or ranks that are killed from outside.
        """
        check_world_size(world_size)
        if services or may_die:
            raise NotHereError(
                "this needs services, or processes that we restart, which spawned "
                "ranks don't have, so run it on Linux"
            )
        limits = limits or Limits()
        job = job_of(
            program,
            world_size,
            args,
            limits,
            services=[],
            seed=seed,
            backend=backend,
            journal=journal,
            last_call=last_call,
            max_frame_bytes=max_frame_bytes,
            ranks_per_node=ranks_per_node,
        )
        encode(job)  # it must be able to travel, before we start anything
        self._wanted = min(max(self._wanted, world_size), _MOST_WARM)
        self.start(wait=False)
        self._start_more(world_size)
        staff, self._warm = self._warm[:world_size], self._warm[world_size:]
        assert self._home is not None
        self._num_runs += 1
        folder = self._home / f"run{self._num_runs}"
        folder.mkdir()
        try:
            for one in staff:
                one.ready()
            return self._watched(
                staff, {**job, "folder": str(folder)}, limits, on_report
            )
        finally:
            for one in staff:
                one.close()
            shutil.rmtree(folder, ignore_errors=True)
            self._start_more(self._wanted)

    def _watched(
        self,
        staff: Sequence[_Warm],
        job: dict[str, Any],
        limits: Limits,
        on_report: Callable[[int, Any], None] | None,
    ) -> Run:
        from distlab.runner.store_keeper import keep_store
        from distlab.runner.supervisor import Supervisor

        names = [f"rank {rank}" for rank in range(len(staff))]
        with contextlib.ExitStack() as stack:
            ours, theirs = socket.socketpair()
            stack.callback(theirs.close)
            stack.callback(ours.close)
            orders = Orders(names, frozenset())
            stack.callback(orders.close)
            store = _Door()
            doors = dict(zip(names, (_Door(one.address) for one in staff), strict=True))
            keeper = keep_store(store, job, doors)
            stack.callback(keeper.close)
            for number, one in enumerate(staff):
                one.tell({**job, "k": "job", "number": number})
            pids = [one.process.pid for one in staff]
            theirs.sendall(encode({"k": "started", "pids": pids}))
            supervisor = Supervisor(
                ours,
                [one.post for one in staff],
                world_size=len(staff),
                orders=orders,
                doors=(),
                keeper=keeper,
                folder=Path(job["folder"]),
                limits=limits,
                on_report=on_report,
                is_unwanted=self.is_unwanted,
            )
            watching = [one.announce_end(theirs) for one in staff]
            try:
                run = supervisor.watch()
            finally:
                for one in staff:
                    end(one.process)
                for thread in watching:
                    thread.join()
        return run

    def settle(self) -> None:
        """See `Cluster.settle`; when `run` returns, its processes have ended."""

    def close(self) -> None:
        """See `Cluster.close`."""
        atexit.unregister(self.close)
        warm, self._warm = self._warm, []
        for one in warm:
            one.close()
        if self._reception is not None:
            self._reception.close()
            self._reception = None
        home, self._home = self._home, None
        if home is not None:
            shutil.rmtree(home, ignore_errors=True)

    def _start_more(self, count: int) -> None:
        """Start processes until `count` of them are waiting."""
        assert self._reception is not None
        assert self._home is not None
        self._warm = [one for one in self._warm if one.process.poll() is None]
        while len(self._warm) < count:
            self._warm.append(_Warm(self._reception, self._home, self._preload))


class _Door(Door):
    """The address of a listener: the store's, which is ours, or that of a rank."""

    def __init__(self, address: tuple[str, int] | None = None) -> None:
        self._listener = None if address else socket.create_server(("127.0.0.1", 0))
        if self._listener is not None:
            address = self._listener.getsockname()
        assert address is not None
        self.address = address

    def listen(self) -> socket.socket:
        """See `Door.listen`."""
        assert self._listener is not None
        return self._listener

    def close(self) -> None:
        """See `Door.close`: whoever got the listener closes it."""


class _Reception:
    """Where new processes connect; each proves by a word that it is the one we started.

    They connect before they import torch, so we rarely wait here.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._arrived: dict[bytes, socket.socket] = {}
        self.port: int = self._listener.getsockname()[1]

    def line_to(self, word: bytes, is_alive: Callable[[], bool]) -> socket.socket:
        """Wait for the process with this word, and return our end of its connection.

        Raises:
            TimeoutError: it has ended, or it doesn't come.
        """
        last = time.monotonic() + START_LIMIT_S
        self._listener.settimeout(0.1)
        while word not in self._arrived:
            try:
                line, _ = self._listener.accept()
            except TimeoutError:
                if not is_alive() or time.monotonic() >= last:
                    raise
                continue
            line.settimeout(1.0)
            try:
                said = _exactly(line, len(word))
            except OSError:  # somebody else
                said = b""
            self._arrived[said] = line
        return self._arrived.pop(word)

    def close(self) -> None:
        """Let nobody in any more."""
        for line in self._arrived.values():
            line.close()
        self._listener.close()


class _Warm:
    """A process that is waiting for a job, and the lines to and from it."""

    def __init__(
        self, reception: _Reception, home: Path, modules: Sequence[str]
    ) -> None:
        self._reception, self._word = reception, secrets.token_hex(16).encode()
        self._line: socket.socket | None = None
        self._requests: list[bytes] = []  # before it has connected
        self._unheard = 1  # it imports `modules` first
        self._heard = b""
        self._port = 0
        self.output, theirs = os.pipe()
        try:
            port = str(reception.port)
            self.process = subprocess.Popen(
                [sys.executable, "-P", BOOT, RANK, port, str(home), *modules],
                stdin=subprocess.PIPE,
                stdout=theirs,
                stderr=theirs,
                cwd=home,
                env=surroundings.of_zygote(os.environ),
                **apart(),
            )
        finally:
            os.close(theirs)
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # if it has ended, `ready` will say so
            self.process.stdin.write(self._word + b"\n")
            self.process.stdin.flush()

    @property
    def address(self) -> tuple[str, int]:
        """Where it can be called, once it is ready."""
        return "127.0.0.1", self._port

    @property
    def post(self) -> Post:
        """Its lines, for a supervisor."""
        assert self._line is not None
        return Post(self._line, self.output)

    def preload(self, modules: Sequence[str]) -> None:
        """Have it import modules while we do something else."""
        self._unheard += 1
        self.tell({"k": "preload", "modules": list(modules)})

    def tell(self, request: dict[str, Any]) -> None:
        """Send it a request, at the latest when it is ready."""
        if self._line is None:
            self._requests.append(encode(request))
            return
        try:
            self._line.sendall(encode(request))
        except OSError as error:
            raise self._dead() from error

    def ready(self) -> None:
        """Wait until it has imported everything that it was told to.

        Raises:
            RunnerError: it couldn't start, or couldn't import something.
        """
        try:
            if self._line is None:
                is_alive = lambda: self.process.poll() is None  # noqa: E731
                self._line = self._reception.line_to(self._word, is_alive)
                self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._line.settimeout(START_LIMIT_S)
                self._line.sendall(b"".join(self._requests))
            while self._unheard:
                self._port = self._hear()["port"]
                self._unheard -= 1
        except OSError as error:
            raise self._dead() from error

    def announce_end(self, to: socket.socket) -> threading.Thread:
        """Tell a supervisor when the process has ended, as a zygote would."""

        def wait() -> None:
            code = self.process.wait()
            exit_ = {"k": "exit", "pid": self.process.pid, "status": status_of(code)}
            with contextlib.suppress(OSError):  # the run is over
                to.sendall(encode(exit_))

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """End the process, and close the lines to it."""
        assert self.process.stdin is not None
        end(self.process)
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        if self._line is not None:
            self._line.close()
        with contextlib.suppress(OSError):  # a supervisor may have closed it
            os.close(self.output)

    def _hear(self) -> dict[str, Any]:
        assert self._line is not None
        while b"\n" not in self._heard:
            piece = self._line.recv(1 << 16)
            if not piece:
                raise ConnectionError
            self._heard += piece
        line, self._heard = self._heard.split(b"\n", 1)
        answer: dict[str, Any] = decode(line)
        return answer

    def _dead(self) -> RunnerError:
        end(self.process)
        said = os.read(self.output, 1 << 16).decode(errors="replace").strip()
        last = said.splitlines()[-1] if said else "it said nothing"
        return RunnerError(f"a process that should be a rank could not start: {last}")


def _exactly(line: socket.socket, count: int) -> bytes:
    said = b""
    while len(said) < count:
        piece = line.recv(count - len(said))
        if not piece:
            break
        said += piece
    return said
