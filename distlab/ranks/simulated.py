"""A cluster whose ranks are simulated, in a worker process on any system."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from distlab.ranks.apart import NotHereError, apart, end
from distlab.ranks.lines import GRACE_S, PLACE, STACKS
from distlab.runner import surroundings
from distlab.runner.cluster import BOOT, START_LIMIT_S, Cluster
from distlab.runner.limits import MAX_RANKS, Limits
from distlab.runner.record import (
    ErrorRecord,
    Outcome,
    RankRecord,
    Run,
    RunCancelledError,
    RunnerError,
)
from distlab.runner.staff import ServiceSpec, importable_name
from distlab.runner.wire import decode, encode

WORKER = "distlab.ranks.worker"
_ASK_S = 0.1
_PATIENCE = 2  # all ranks together may take this many times as long as real ones
_UNCAUGHT = 1 << 8  # exit status of a Python that failed with an exception
_KILL_S = 2.0  # that a worker gets to end itself after the grace is over


class SimulatedCluster(Cluster):
    """Simulated ranks behind the methods of `Cluster`, one run at a time.

    Ranks are threads in virtual time, and only one of them runs at a time. Therefore
    `clock`, `time.sleep` and timeouts take no real time, we find a deadlock at once,
    and only `limits.seconds` refers to the wall clock. We limit memory only on Linux,
    for all ranks together.
    """

    def __init__(self, *, preload: tuple[str, ...] = ()) -> None:
        super().__init__(preload=preload)
        self._worker: _Worker | None = None

    def start(self, *, wait: bool = True) -> None:
        """See `Cluster.start`."""
        if self._worker is not None and self._worker.has_ended:
            self.close()
        if self._worker is None:
            self._worker = _Worker(self._preload)
            atexit.register(self.close)
        if wait:
            self._worker.ready()

    def warm(self, *modules: str) -> None:
        """See `Cluster.warm`."""
        new = [name for name in modules if name not in self._preload]
        self._preload += new
        if new and self._worker is not None and not self._worker.has_ended:
            self._worker.preload(new)

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
        """Run `program(context, *args)` on simulated ranks; see `Cluster.run`.

        A journal is always kept, because it says how a run ended.

        Raises:
            NotHereError: it needs services, or ranks that are killed from outside.
        """
        if services or may_die:
            raise NotHereError(
                "this needs real processes, which simulated ranks don't have, so run "
                "it on Linux"
            )
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"{world_size} ranks: choose between 1 and {MAX_RANKS}")
        limits = limits or Limits()
        if world_size > 1:  # they take turns, whereas real ranks use several cores
            limits = replace(limits, seconds=_PATIENCE * limits.seconds)
        job = {
            "k": "run",
            "program": importable_name(program),
            "args": list(args),
            "world_size": world_size,
            "seconds": limits.seconds,
            "memory_bytes": limits.memory_bytes,
            "output_bytes": limits.output_bytes,
            "journal_events": limits.journal_events,
            "seed": seed,
            "ranks_per_node": ranks_per_node or world_size,
        }
        line = encode(job)
        self.start()
        assert self._worker is not None
        try:
            played = _Played(self._worker, world_size, limits, on_report)
            run = played.watch(line, self.is_unwanted)
        except BaseException:
            self.close()
            raise
        if run.outcome == "timeout" or self._worker.has_ended:
            self.close()  # what it left behind must not reach the next run
        return run

    def settle(self) -> None:
        """See `Cluster.settle`; a run leaves no process behind."""

    def close(self) -> None:
        """See `Cluster.close`."""
        atexit.unregister(self.close)
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


class _Worker:
    """The worker process, and the lines to and from it."""

    def __init__(self, preload: list[str]) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="distlab-"))
        (self.folder / "ranks").mkdir()
        self._errors = (self.folder / "errors").open("w+b")
        self._process = subprocess.Popen(
            [sys.executable, "-P", BOOT, WORKER, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=self.folder,
            env={**surroundings.of_zygote(os.environ), "PYTHONUTF8": "1"},
            **apart(),
        )
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._unheard = 0  # requests that haven't been answered with "ready"
        self.preload(preload)

    @property
    def has_ended(self) -> bool:
        """True if the process has ended."""
        return self._process.poll() is not None

    def ready(self) -> None:
        """Wait until it has imported everything that it was told to.

        Raises:
            RunnerError: it couldn't start, or couldn't import something.
        """
        while self._unheard:
            record = self.hear(START_LIMIT_S)
            if record is None or record.get("k") != "ready":
                raise self.dead()
            self._unheard -= 1

    def preload(self, modules: list[str]) -> None:
        """Tell it to import modules while we do something else."""
        self.tell(encode({"k": "preload", "modules": modules}))
        self._unheard += 1

    def tell(self, line: bytes) -> None:
        """Send it a line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError as error:
            raise self.dead() from error

    def hear(self, timeout_s: float) -> dict[str, Any] | None:
        """Return its next record; None if there is none in time, or it has ended."""
        try:
            line = self._lines.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if not line:
            self._process.wait()
            return None
        record: dict[str, Any] = decode(line)
        return record

    def end(self) -> int:
        """End the process and what ranks have forked; return its exit status."""
        return end(self._process)

    def close(self) -> None:
        """End the process and remove its folder."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.end()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        # A process that a rank forked may keep this pipe open, until it has ended.
        self._reader.join(timeout=_KILL_S)
        if not self._reader.is_alive():
            self._process.stdout.close()
        self._errors.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def dead(self) -> RunnerError:
        """Return the error that says why it stopped."""
        self._errors.flush()
        said = (self.folder / "errors").read_text(encoding="utf-8", errors="replace")
        last = said.strip().splitlines()[-1] if said.strip() else "it said nothing"
        return RunnerError(f"the process that simulates ranks could not run: {last}")


class _Played:
    """One run in a worker, as its parent sees it."""

    def __init__(
        self,
        worker: _Worker,
        world_size: int,
        limits: Limits,
        on_report: Callable[[int, Any], None] | None,
    ) -> None:
        self._worker, self._limits = worker, limits
        self._on_report = on_report or (lambda rank, value: None)
        self._values: dict[int, Any] = {}
        self._ranks = tuple(RankRecord(rank=rank) for rank in range(world_size))
        self._started = time.monotonic()

    def watch(self, line: bytes, is_unwanted: Callable[[], bool] | None) -> Run:
        """Send the job, and wait until the run has ended.

        Raises:
            RunCancelledError: nobody needs the result any more.
        """
        self._worker.tell(line)
        last = self._started + self._limits.seconds + GRACE_S + _KILL_S
        while True:
            left = last - time.monotonic()
            record = self._worker.hear(min(left, _ASK_S) if is_unwanted else left)
            if record is not None and record["k"] == "run":
                return self._ended(record)
            if record is not None:
                self._take(record)
            elif self._worker.has_ended or time.monotonic() >= last:
                return self._broken_off()
            elif is_unwanted and is_unwanted():
                raise RunCancelledError

    def _take(self, record: dict[str, Any]) -> None:
        if record["k"] == "value":
            self._values[record["rank"]] = record["value"]
        else:
            self._on_report(record["rank"], record["value"])

    def _ended(self, facts: dict[str, Any]) -> Run:
        for known, told in zip(self._ranks, facts["ranks"], strict=True):
            error = told.pop("error")
            vars(known).update(told)
            known.error = ErrorRecord(**error) if error else None
            known.value = self._values.get(known.rank)
        waits_for, cycle = facts["waits_for"], facts["cycle"]
        return self._run(facts["outcome"], waits_for=waits_for, cycle=cycle)

    def _broken_off(self) -> Run:
        """Return the run of a worker that crashed, or looped past its grace period.

        Raises:
            RunnerError: the worker failed by itself, which is our own mistake.
        """
        from distlab.runner import stacks

        status = self._worker.end()
        took = time.monotonic() - self._started
        place = (self._worker.folder / PLACE).read_bytes()
        rank = self._ranks[min(place[0], len(self._ranks) - 1)]
        rank.stack = stacks.read_from(self._worker.folder / STACKS)
        if took >= self._limits.seconds:
            return self._run("timeout")
        if status == _UNCAUGHT:  # a rank ends in other ways
            raise self._worker.dead()
        rank.status, rank.exit_status, rank.failed_s = "died", status, took
        return self._run("died")

    def _run(self, outcome: Outcome, **more: Any) -> Run:
        from distlab.runner.autopsy import explain

        run = Run(
            world_size=len(self._ranks),
            outcome=outcome,
            ranks=self._ranks,
            seconds=time.monotonic() - self._started,
            limit_s=self._limits.seconds,
            **more,
        )
        return replace(run, explanation=explain(run))
