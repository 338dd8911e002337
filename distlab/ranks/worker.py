"""The process that simulates all ranks of a run, one run after another.

It reads one request per line and writes one record per line (see runner/wire.py):

    preload                     → ready                      modules are imported
    run, the job                → report, value, value, …    while ranks run
                                → run                        how it ended

Real ranks each have their own process, and the process ends with the run. Here ranks
are threads, so whenever another rank continues, we swap everything that a process would
keep to itself (`OwnProcess`). When a run is over, we undo what it has changed. A
call that would end the process, such as os._exit, ends the rank.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import mmap
import os
import queue
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, NoReturn

import torch

from distlab.processes.fork_server import import_all
from distlab.ranks.lines import GRACE_S, PLACE, STACKS
from distlab.runner import Limits, RankContext
from distlab.runner.limits import cap_memory
from distlab.runner.own_folder import remove, share
from distlab.runner.rank import resolve
from distlab.runner.wire import decode, encode
from distlab.sim.generators import (
    Generators,
    OneGenerator,
    SeveralGenerators,
    pythons,
    torchs,
)
from distlab.sim.results import SimRun
from distlab.sim.run import run as simulate
from distlab.sim.surroundings import RankDied

_UNITS = "distlab_units"
_SLEEP, _EXIT = time.sleep, os._exit
_WORLDS = 2
"""All ranks and the leftovers of earlier runs together get this many ranks' memory."""

_CLOCKS: dict[int, Any] = {}
"""The virtual clock of each rank, by its thread."""


class OwnProcess:
    """The state that one rank finds in the process when it continues."""

    def __init__(
        self, rank: int, folder: str, environment: MutableMapping[bytes, bytes]
    ) -> None:
        self.rank, self.folder = rank, folder
        self.environment = environment
        self.units: dict[str, ModuleType] = {}
        self.dtype = torch.float32


class Process:
    """Swaps the state of a process, in the way `Generators` swap random numbers."""

    word: Any = None
    seen_word = -1
    anyone_drew = True

    def __init__(self, home: Path, seed: int, place: mmap.mmap) -> None:
        self._home, self._seed, self._place = home, seed, place
        self._outside = OwnProcess(0, os.getcwd(), _environment())
        self._folder = self._outside.folder

    def own(self, seed: int) -> OwnProcess:
        """See `Generators.own`."""
        rank = seed - self._seed
        folder = self._home / f"rank{rank}"
        folder.mkdir(exist_ok=True)
        return OwnProcess(rank, str(folder), dict(_environment()))

    def begin(self, own: OwnProcess) -> None:
        """See `Generators.begin`."""
        self.put(own)

    def put(self, own: OwnProcess) -> None:
        """See `Generators.put`."""
        self._place[0] = own.rank
        if own.folder != self._folder:
            os.chdir(own.folder)
            self._folder = own.folder
        environment: Any = os.environ
        environment._data = own.environment
        sys.modules.update(own.units)
        if own.dtype != torch.get_default_dtype():
            torch.set_default_dtype(own.dtype)

    def take(self, own: OwnProcess) -> None:
        """See `Generators.take`."""
        own.folder = self._folder = os.getcwd()
        own.environment = _environment()
        own.units = {name: sys.modules.pop(name) for name in _units()}
        own.dtype = torch.get_default_dtype()

    def restore(self) -> None:
        """See `Generators.restore`."""
        for name in _units():
            del sys.modules[name]
        self.put(self._outside)


def _environment() -> MutableMapping[bytes, bytes]:
    environment: Any = os.environ
    return environment._data  # type: ignore[no-any-return]


def _units() -> list[str]:
    """Return the names of learners' modules, which each rank has to itself."""
    return [name for name in list(sys.modules) if name.startswith(_UNITS)]


class Worker:
    """Answers the requests of one parent."""

    def __init__(
        self, requests: queue.SimpleQueue[bytes], answers: BinaryIO, folder: Path
    ) -> None:
        self._requests, self._answers = requests, answers
        self._folder = folder
        with (folder / PLACE).open("w+b") as file:
            file.truncate(1)
            self._place = mmap.mmap(file.fileno(), 1)
        self._stacks = (folder / STACKS).open("w", encoding="utf-8")
        self._is_capped = False
        self._writing = threading.Lock()  # a rank's own threads may report too

    def serve(self) -> NoReturn:
        """Answer one request after the other; see `_read` for the end.

        Raises:
            BrokenPipeError: the parent has been killed while ranks ran.
        """
        while True:
            request = decode(self._requests.get())
            if request["k"] == "preload":
                import_all(request["modules"])
                self._say({"k": "ready"})
            else:
                self._play(request)

    def _say(self, record: dict[str, Any]) -> None:
        line = encode(record)
        with self._writing:
            self._answers.write(line)
            self._answers.flush()

    def _play(self, job: dict[str, Any]) -> None:
        home = self._folder / "ranks"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        program = _found(job["program"])  # imports take time that isn't the program's
        self._stacks.seek(0)
        self._stacks.truncate()
        faulthandler.enable(self._stacks, all_threads=False)
        faulthandler.dump_traceback_later(
            job["seconds"] + GRACE_S, file=self._stacks, exit=True
        )
        limits = Limits(
            seconds=job["seconds"],
            output_bytes=job["output_bytes"],
            journal_events=job["journal_events"],
        )
        if not self._is_capped:  # the guard lets nobody do it a second time
            self._is_capped = True
            cap_memory(_WORLDS * job["memory_bytes"])
        with _as_before():
            done = simulate(
                partial(self._live, program),
                job["world_size"],
                *job["args"],
                limits=limits,
                on_report=self._report,
                seed=job["seed"],
                carrier="threads",
                trace=False,
                wall_limit_s=job["seconds"],
                hide=True,
                times_out=True,
                ranks_per_node=job["ranks_per_node"],
                belongings=partial(_belongings, home, job["seed"], self._place),
            )
        faulthandler.cancel_dump_traceback_later()
        self._say({"k": "run", **_facts(done)})

    def _live(
        self, program: Callable[..., Any], context: RankContext, *args: Any
    ) -> None:
        _CLOCKS[threading.get_ident()] = context.clock
        value = program(context, *args)
        # As it is now: another rank may get hold of the same tensor.
        self._say({"k": "value", "rank": context.rank, "value": value})

    def _report(self, rank: int, value: Any) -> None:
        self._say({"k": "report", "rank": rank, "value": value})


def _found(name: str) -> Callable[..., Any]:
    """Return the program of this name, or one that raises our error on each rank."""
    try:
        return resolve(name)
    except Exception as error:
        return partial(_fail, error)


def _fail(error: Exception, *_: Any) -> NoReturn:
    raise error


def _belongings(home: Path, seed: int, place: mmap.mmap) -> Generators:
    numbers = [OneGenerator(source, lazy=False) for source in (torchs(), pythons())]
    return SeveralGenerators([*numbers, Process(home, seed, place)])


def _facts(done: SimRun) -> dict[str, Any]:
    ranks = [
        {**vars(record), "error": asdict(record.error) if record.error else None}
        for record in done.ranks
    ]
    return {
        "ranks": ranks,
        "outcome": done.outcome,
        "waits_for": done.waits_for,
        "cycle": done.cycle,
    }


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Undo changes to this process that a later program would see."""
    threads, state = torch.get_num_threads(), random.getstate()
    exact = torch.are_deterministic_algorithms_enabled()
    path = list(sys.path)
    try:
        yield
    finally:
        _CLOCKS.clear()
        sys.path[:] = path
        random.setstate(state)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(exact)


def _sleep(seconds: float) -> None:
    """In a rank, let virtual time pass, so that the others can continue."""
    clock = _CLOCKS.get(threading.get_ident())
    if clock is None:
        _SLEEP(seconds)
    else:
        clock.sleep(seconds)


def _end_rank(status: int) -> NoReturn:
    raise RankDied(status)


def _take_over() -> None:
    """Make calls that would stop or end this process do so to the calling rank."""
    here, kill = os.getpid(), os.kill

    def kill_rank(pid: int, number: int) -> None:
        if pid != here or threading.get_ident() not in _CLOCKS:
            kill(pid, number)
        elif number:
            _end_rank(number)

    replaced: dict[str, Any] = {
        "_exit": lambda code: _end_rank((code & 0xFF) << 8),
        "abort": lambda: _end_rank(signal.SIGABRT),
        "kill": kill_rank,
    }
    for name, function in replaced.items():
        setattr(os, name, function)
    setattr(time, "sleep", _sleep)  # noqa: B010 - to mypy it is fixed


def main(arguments: list[str]) -> None:
    """Serve the parent; the only argument is our folder."""
    (folder,) = arguments
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    lifeline, answers = os.dup(0), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # ranks have no keyboard
    os.close(nothing)
    os.dup2(2, 1)  # what C code prints is not for the parent
    share(str(Path(folder) / "ranks"))
    worker = Worker(requests, answers, Path(folder))
    _take_over()
    # Below `threading`: it is no thread of a rank.
    _thread.start_new_thread(_read, (lifeline, requests, folder))
    with contextlib.suppress(BrokenPipeError):
        worker.serve()
    _SLEEP(GRACE_S)  # `_read` ends us


def _read(lifeline: int, requests: queue.SimpleQueue[bytes], folder: str) -> None:
    """Take the parent's requests until it hangs up, and then end this process.

    It kills us before it hangs up, and removes the folder. So if we get here, somebody
    has killed it, and whatever ranks are doing, nobody wants to know any more.
    """
    rest = b""
    while piece := os.read(lifeline, 1 << 20):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            requests.put(line)
    remove(folder)
    _EXIT(0)
