"""Start ranks, watch them, end them: the parent's door to the zygote."""

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
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from distlab.processes.tree import become_subreaper, end_descendants
from distlab.runner import surroundings
from distlab.runner.doors import Door
from distlab.runner.limits import MAX_RANKS, Limits
from distlab.runner.orders import Kind, Orders, number_of
from distlab.runner.posts import Post, close_all, open_posts
from distlab.runner.record import Run, RunnerError
from distlab.runner.staff import ServiceSpec, describe, importable_name
from distlab.runner.wire import decode
from distlab.runner.zygote_protocol import send_request

BOOT = Path(__file__).with_name("boot.py")
ZYGOTE = "distlab.runner.zygote"
START_LIMIT_S = 120.0  # importing torch from a cold disk can take long


class Cluster:
    """Ranks on this machine, as many runs as wanted, one at a time.

    The first run starts a zygote (about a second: it imports torch); every later one
    only forks. Use it as a context manager, or call `close`. While a run goes on,
    `is_unwanted` is asked now and then, if set; once it says yes, the run is given up.
    """

    def __init__(self, *, preload: tuple[str, ...] = ()) -> None:
        self.is_unwanted: Callable[[], bool] | None = None
        self._preload = list(preload)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._errors: Any = None
        self._folder: str | None = None  # of the last run
        self._lines = b""
        self._is_ready = False
        self._orders: Orders | None = None  # of the run under way

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self, *, wait: bool = True) -> None:
        """Start the zygote now; with `wait=False` it imports torch while we go on.

        Raises:
            RunnerError: it could not be started.
        """
        if self._process is not None and self._process.poll() is not None:
            self.close()  # somebody ended it between two runs
        if self._process is None:
            self._spawn()
        if wait:
            self._ready()

    def warm(self, *modules: str) -> None:
        """Import `modules` in the zygote, so that no rank has to.

        "module:function" also calls that function; it may start no thread.
        """
        new = [name for name in modules if name not in self._preload]
        if new and self._process is not None:
            self.settle()
            self._ready()
            self._ask({"k": "preload", "modules": new})
            _expect_one_thread(self._await("preloaded"))
        self._preload += new

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
        """Run `program(context, *args)` on `world_size` new processes to its end.

        `services` are processes beside the ranks, called by their names: of each the
        function that makes it from a `ServiceContext`, or a tuple of that and more
        arguments. The run outlives deaths of those named in `may_die`, ranks and
        services; see `kill`, `freeze`, `thaw` and `restart`. Calls carry messages of
        up to `max_frame_bytes`. Ranks are numbered as on nodes of `ranks_per_node`
        (`local_rank`); 0 stands for one node.

        Without a `journal`, `last_call` lets the ranks note the call that they are in:
        much cheaper, and enough to say where each was when the time is up.

        `args` and results are plain data and tensors. `on_report(rank, value)` is
        called for each `context.report(value)`. When this returns, every process of the
        run has been told to end; `settle` waits until none is left.

        Raises:
            ValueError: fewer than 1 or more than 64 ranks, a program or a service that
                other processes cannot import, a name in `may_die` that nobody has.
            TypeError: an argument that cannot travel between processes.
            RunnerError: the ranks could not be started.
            RunCancelledError: `is_unwanted` said so.
        """
        check_world_size(world_size)
        self.start(wait=False)
        from distlab.runner.store_keeper import STORE, keep_store
        from distlab.runner.supervisor import Supervisor  # imports torch, as the zygote

        limits = limits or Limits()
        described = describe(services or {})
        names = [f"rank {rank}" for rank in range(world_size)]
        names += [service["name"] for service in described]
        mortal = frozenset(number_of(who, names) for who in may_die)
        job = job_of(
            program,
            world_size,
            args,
            limits,
            services=described,
            seed=seed,
            backend=backend,
            journal=journal,
            last_call=last_call,
            max_frame_bytes=max_frame_bytes,
            ranks_per_node=ranks_per_node,
        )
        self.settle()
        self.start()
        assert self._socket is not None
        self._folder = tempfile.mkdtemp(prefix="distlab-")
        try:
            with contextlib.ExitStack() as stack:
                doors = [Door() for _ in (*names, STORE)]
                for door in doors:
                    stack.callback(door.close)
                keeper = keep_store(
                    doors[-1], job, dict(zip(names, doors, strict=False))
                )
                stack.callback(keeper.close)
                posts = self._send_job({**job, "folder": self._folder}, doors[:-1])
                stack.callback(close_all, posts)
                orders = self._orders = Orders(names, mortal)
                stack.callback(self._take_no_more_orders)
                supervisor = Supervisor(
                    self._socket,
                    posts,
                    world_size=world_size,
                    orders=orders,
                    doors=doors,
                    keeper=keeper,
                    folder=Path(self._folder),
                    limits=limits,
                    on_report=on_report,
                    is_unwanted=self.is_unwanted,
                )
                try:
                    run = supervisor.watch()
                finally:
                    self._lines = supervisor.unread()
        except BaseException:
            self._end_ranks()
            self.settle()
            raise
        self._end_ranks()  # while they die, the caller looks at what they did
        return run

    def kill(self, who: int | str) -> None:
        """SIGKILL a rank, or a service, of the run under way; returns at once.

        This and the following may be called from any thread, and in `on_report`.

        Raises:
            ValueError: no run is under way, nobody is called that, or it was not named
                in `may_die`.
        """
        self._order("kill", who)

    def freeze(self, who: int | str) -> None:
        """SIGSTOP it: it does nothing until `thaw`, and its connections stay open."""
        self._order("freeze", who)

    def thaw(self, who: int | str) -> None:
        """SIGCONT it."""
        self._order("thaw", who)

    def restart(self, who: int | str) -> None:
        """Fork a new process in its place, after a SIGKILL if it is still alive.

        It runs from the beginning, in the same folder and under the same address.
        """
        self._order("restart", who)

    def _order(self, kind: Kind, who: int | str) -> None:
        orders = self._orders
        if orders is None:
            raise ValueError(f"{kind}: no run is under way")
        orders.give(kind, who)

    def _take_no_more_orders(self) -> None:
        orders, self._orders = self._orders, None
        if orders is not None:
            orders.close()

    def settle(self) -> None:
        """Wait until no process and no file of an earlier run is left."""
        if self._folder is None:
            return
        with contextlib.suppress(RunnerError):  # the next run starts a new zygote
            self._await("ended")
        self._remove_folder()

    def close(self) -> None:
        """End the zygote and everything below it. Safe to call twice."""
        atexit.unregister(self.close)
        if self._socket is not None:
            self._socket.close()  # the zygote takes this as the order to clean up
            self._socket = None
        if self._process is not None:
            if not self._is_ready:
                self._process.kill()  # still importing torch: it has no ranks to end
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                end_descendants(self._process.pid)
                self._process.kill()
                self._process.wait()
            self._process = None
        self._remove_folder()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    # ── the zygote ──────────────────────────────────────────────────────────────────

    def _spawn(self) -> None:
        become_subreaper()
        ours, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        with theirs:
            descriptor = str(theirs.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-P", BOOT, ZYGOTE, descriptor, *self._preload],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C in the terminal reaches only us
                env=surroundings.of_zygote(os.environ),
            )
        self._socket = ours
        self._lines = b""
        self._is_ready = False
        atexit.register(self.close)

    def _ready(self) -> None:
        if not self._is_ready:
            _expect_one_thread(self._await("zygote"))
            self._is_ready = True

    def _ask(
        self, request: dict[str, Any], descriptors: list[int] | None = None
    ) -> None:
        assert self._socket is not None
        self._socket.setblocking(True)
        try:
            send_request(self._socket, request, descriptors)
        except OSError as error:
            raise self._dead() from error

    def _await(self, kind: str) -> dict[str, Any]:
        assert self._socket is not None
        self._socket.setblocking(True)
        self._socket.settimeout(START_LIMIT_S)
        while True:
            while b"\n" not in self._lines:
                try:
                    piece = self._socket.recv(1 << 16)
                except OSError as error:
                    raise self._dead() from error
                if not piece:
                    raise self._dead()
                self._lines += piece
            line, self._lines = self._lines.split(b"\n", 1)
            message: dict[str, Any] = decode(line)
            if message["k"] == kind:
                return message

    def _dead(self) -> RunnerError:
        said = ""
        if self._errors is not None:
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip()
        self.close()
        last = said.splitlines()[-1] if said else "it said nothing"
        return RunnerError(f"the process that starts ranks could not run: {last}")

    def _send_job(self, job: dict[str, Any], doors: Sequence[Door]) -> list[Post]:
        return open_posts(doors, lambda descriptors: self._ask(job, descriptors))

    def _end_ranks(self) -> None:
        if self._socket is None:
            return
        with contextlib.suppress(RunnerError):  # the next run starts a new zygote
            self._ask({"k": "end"})

    def _remove_folder(self) -> None:
        folder, self._folder = self._folder, None
        if folder is None:
            return
        # A program may have put anything in its place, a link to elsewhere too.
        with contextlib.suppress(OSError):
            os.unlink(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _expect_one_thread(told: dict[str, Any]) -> None:
    if told["threads"] != 1:
        text = f"the zygote has {told['threads']} threads; it must have one"
        raise RunnerError(f"{text}: of what it imported, something starts a thread")


def job_of(
    program: Callable[..., Any],
    world_size: int,
    args: Sequence[Any],
    limits: Limits,
    *,
    services: Sequence[dict[str, Any]],
    seed: int,
    backend: str,
    journal: bool,
    last_call: bool,
    max_frame_bytes: int,
    ranks_per_node: int,
) -> dict[str, Any]:
    """Return what every process of a run is told, for runner/rank.py to be a rank."""
    return {
        "k": "start",
        "program": importable_name(program),
        "args": list(args),
        "world_size": world_size,
        "services": services,
        "lives": 0,
        "seconds": limits.seconds,
        "memory_bytes": limits.memory_bytes,
        "seed": seed,
        "backend": backend,
        "secret": secrets.token_hex(32),
        "journal": journal,
        "last_call": last_call and not journal,
        "max_frame_bytes": max_frame_bytes,
        "ranks_per_node": ranks_per_node or world_size,
    }


def check_world_size(world_size: int) -> None:
    """Raise ValueError unless a run can have this many ranks."""
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(
            f"{world_size} ranks: choose between 1 and {MAX_RANKS} real processes"
        )
