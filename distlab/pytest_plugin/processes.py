"""Run a test's body on real ranks: forked processes, watched until the test is decided.

The first test starts a process that imports torch and forks the ranks of all tests, so
that a test takes tenths of a second. Each test has its own store, at a port that the
system chooses. All files are anonymous.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import IO, Any

import pytest

from distlab.flight.live import Finding, Quiet
from distlab.flight.told import lines_of, row_of, where_all_are, where_in
from distlab.flight.watch import Watch
from distlab.launch.config import LOOPBACK, LaunchConfig, LaunchError
from distlab.launch.forked import PRELOADED, Exited, Forked
from distlab.launch.ranks import Meeting, rank_variables
from distlab.launch.stores import Store
from distlab.pytest_plugin.body import SHOW
from distlab.pytest_plugin.job import RankedTest, Setting
from distlab.pytest_plugin.told import Result
from distlab.recorder.agreement import remove
from distlab.recorder.attach import variables as recording
from distlab.recorder.recorder import prefix
from distlab.runner.signals import name_of_signal

_PROGRAM, _MODULES = "distlab.pytest_plugin.body", "distlab.pytest_plugin.job"
_LOOK_S = 0.05
_TOGETHER_S = 1.0  # for ranks that fail shortly after the first
_ENDING_S = 5.0
_PATIENCE = timedelta(seconds=10)
_KEYS = prefix(0)


class Processes:
    """The ranks of one pytest session, a test at a time."""

    def __init__(self) -> None:
        self._forked: Forked | None = None
        self._number = 0

    def close(self) -> None:
        """End every process."""
        forked, self._forked = self._forked, None
        if forked is not None:
            forked.close()

    def run(self, job: RankedTest, setting: Setting) -> Result:
        """Call the body on `setting.world_size` ranks until the test is decided."""
        try:
            forked = self._start()
            with _Test(forked, self._number, job, setting) as test:
                self._number += setting.world_size
                return test.run()
        except LaunchError as error:
            self.close()  # the next test starts another one
            pytest.fail(f"the ranks can't run: {error}", pytrace=False)

    def _start(self) -> Forked:
        if self._forked is None:
            if not sys.platform.startswith("linux"):
                raise LaunchError("they need Linux; simulated=True runs anywhere")
            # What the test's modules have imported of torch, the ranks will need too.
            loaded = [name for name in sys.modules if name.startswith("torch.distrib")]
            self._forked = Forked(
                [_PROGRAM],
                {"OMP_NUM_THREADS": "1"} | dict(os.environ),
                run_as="module",
                preloaded=(*PRELOADED, "pytest", _MODULES, *sorted(loaded)),
            )
            self._forked.wait()
        return self._forked


class _Test:
    """The ranks of one test, from their start until none is left."""

    def __init__(
        self, forked: Forked, first: int, job: RankedTest, setting: Setting
    ) -> None:
        self._forked, self._first, self._setting = forked, first, setting
        self._job, self._size = job, setting.world_size
        self._result = Result(world_size=self._size)
        self._alive: set[int] = set()  # ranks whose processes run
        self._logs: dict[int, IO[bytes]] = {}
        self._found: Finding | None = None
        self._is_decided = False
        self._store = Store(LOOPBACK, 0)

    def __enter__(self) -> _Test:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._end()
        finally:
            for log in self._logs.values():
                log.close()
            self._store.close()

    def run(self) -> Result:
        """Start the ranks, and watch them."""
        self._store.begin()
        for rank in range(self._size):
            self._begin(rank)
        self._watch()
        self._is_decided = True
        self._end()
        for rank, log in self._logs.items():
            log.seek(0)
            self._result.output[rank] = log.read().decode(errors="replace")
        return self._result

    def _begin(self, rank: int) -> None:
        meeting = Meeting(
            address=self._store.address, port=self._store.port, generation=1
        )
        config = LaunchConfig(nproc_per_node=self._size)
        environment = rank_variables(config, rank, meeting, os.environ)
        environment |= recording(environment)
        log = self._logs[rank] = tempfile.TemporaryFile()  # noqa: SIM115 - in __exit__
        with tempfile.TemporaryFile() as file:
            pickle.dump((self._job, environment), file)
            file.flush()
            number = self._first + rank
            self._forked.start(number, log.fileno(), file.fileno(), "")
        self._alive.add(rank)

    # ── until the test is decided ───────────────────────────────────────────────────

    def _watch(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        where = self._store.address, self._store.port
        store = TCPStore(*where, None, False, _PATIENCE, wait_for_workers=False)
        watch = Watch(store, _KEYS, self._size, self._tell)
        try:
            self._until_decided(watch)
        finally:
            remove(store, f"{_KEYS}shared/0")

    def _until_decided(self, watch: Watch) -> None:
        result = self._result
        late_s = time.monotonic() + self._setting.timeout_s
        has_failed = False
        while len(result.ends) + len(result.lost) < self._size:
            self._take(_LOOK_S)
            now_s = time.monotonic()
            watch.look()
            if result.has_failed and not has_failed:
                has_failed, late_s = True, now_s + _TOGETHER_S
            if self._found is not None and not has_failed:
                lines = [line for _, line in lines_of(self._found)]
                result.report = "\n".join(lines)
                return
            if now_s > late_s:
                self._give_up(watch)
                return

    def _tell(self, found: Finding | Quiet) -> None:
        if isinstance(found, Finding):
            self._found = found

    def _give_up(self, watch: Watch) -> None:
        """Say where the ranks are whose bodies haven't ended."""
        result = self._result
        going = [
            rank
            for rank in range(self._size)
            if rank not in result.ends and rank not in result.lost
        ]
        if result.has_failed:
            result.waiting = {r: _place(row_of(r, watch.posts)) for r in going}
            return
        for rank in going:
            self._forked.signal(self._first + rank, SHOW)
        self._take(_TOGETHER_S / 2)
        lines = where_all_are(Quiet(0.0, watch.posts, self._size))
        head = (
            f"timeout: the test has run for {self._setting.timeout_s:g} s. This "
            "doesn't prove a hang, but here is where each rank is, and their stacks"
        )
        result.report = "\n".join([head, "", *(line for _, line in lines)])

    def _take(self, limit_s: float) -> None:
        """Take in what the ranks say, and their ends."""
        for heard in self._forked.receive(limit_s):
            rank = heard.number - self._first
            if rank not in range(self._size):
                continue  # of an earlier test
            if isinstance(heard, Exited):
                self._alive.discard(rank)
                if rank not in self._result.ends and not self._is_decided:
                    self._result.lost[rank] = _how(heard.code)
            elif "outcome" in heard.words:
                self._result.ends[rank] = heard.words

    # ── the end ─────────────────────────────────────────────────────────────────────

    def _end(self) -> None:
        """Let the ranks end by themselves if all is well; then leave none."""
        is_over = len(self._result.ends) == self._size
        if is_over or self._found is not None:
            for rank in self._alive:
                self._forked.tell(self._first + rank, over=True)
            self._wait()
        for rank in self._alive:
            self._forked.signal(self._first + rank, signal.SIGKILL)
        self._wait()
        self._forked.sweep()

    def _wait(self) -> None:
        until_s = time.monotonic() + _ENDING_S
        while self._alive and time.monotonic() < until_s:
            self._take(_LOOK_S)


def _how(code: int) -> str:
    if code < 0:
        return f"its process was ended by {name_of_signal(-code)}"
    return f"its process has ended with exit code {code} before the test did"


def _place(row: Mapping[str, Any]) -> str:
    if row["state"] != "waiting":
        return "was still running"
    where = where_in(row)
    return f"was waiting in {row['call'] or 'a call'}" + (
        f" ({where})" if where else ""
    )
