"""The contract of 4.7: which actions are due to an event; choices are the learner's.

A supervisor may number its processes as it likes, and may give an empty rank to any
process that is ready. So the actions of each event are compared with what is due, and
then taken over.
"""

from __future__ import annotations

from math import inf
from signal import SIGTERM
from typing import NamedTuple

from distlab.given.process_group import SIGKILL
from distlab.grading.checks.recovery.faults import Script
from distlab.grading.kit.launcher_actions import END, Fact

_LATE_S = 0.1


class Due(NamedTuple):
    """What must be done about an event; WakeAt is not compared."""

    reason: str = ""  # "begin", "done", "failure", "stale", "limit", "loop" …
    num_starts: int = 0
    form: int = 0  # the generation; 0: no Form
    signals: frozenset[tuple[int, int]] = frozenset()  # process, signal
    finish: int | None = None
    may_kill: frozenset[int] = frozenset()  # a SIGKILL to these is no mistake


class SupervisorContract:
    """What a right supervisor knows."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.used: set[int] = set()  # the numbers of all processes
        self.alive: set[int] = set()
        self.idle: set[int] = set()  # ready, without a rank
        self.members: dict[int, int] = {}
        self.generation, self.is_whole = 0, False
        self.restarts_s: list[float] = []
        self.in_broken_s: list[float] = []  # those while the group is not whole
        self.events_s: list[float] = []  # those that started at least one process
        self.failures: list[int] = []  # codes of all ends that set the exit code
        self.num_failed = 0  # generations that failed after the newest step
        self.num_ever = 0  # generations that failed
        self.newest, self.is_new = -1, False
        self.late_step: Fact = ()  # a higher one, of an older generation, since a step
        self.has_repeated = False  # a step of this generation that is not new, since
        self.stop_code: int | None = None
        self.stop_reason = ""
        self.kill_at_s, self.has_killed = inf, False

    def due(self, event: Fact, now_s: float) -> Due:
        """What must be done about an event, which happens."""
        kind, *values = event
        if event == END:
            return Due("end")
        if kind == "ended":
            process, code = values
            return (
                self._ended(process, code, now_s) if process in self.alive else _STALE
            )
        if kind == "tick":
            return self._tick(now_s)
        if self.stop_code is not None:
            return Due("stopping", may_kill=frozenset(self.alive))
        if kind == "begin":
            num = self.script.world_size + self.script.num_standbys
            return Due("begin", num)
        if kind == "interrupted":
            return self._stop("interrupted", 128 + values[0], now_s)
        return self._said(kind, *values)

    def _said(self, kind: str, *values: int) -> Due:
        """What a process, or the agent that watches it, says."""
        if kind == "ready":
            if values[0] not in self.alive - set(self.members.values()):
                return _STALE
            self.idle.add(values[0])
            return Due("ready", form=self._next())
        if values[1] != self.generation:
            if kind == "completed" and values[0] > self.newest and self.num_failed:
                self.late_step = kind, *values
            return _STALE
        if kind == "frozen":
            found = {values[0]} & self.alive
            return Due("frozen", signals=_all(found, SIGKILL)) if found else _STALE
        if values[0] > self.newest:
            self.newest, self.is_new = values[0], True
            self.late_step, self.has_repeated = (), False
        elif self.num_failed:
            self.has_repeated = True
        return Due("step")

    def _tick(self, now_s: float) -> Due:
        if now_s >= self.kill_at_s and not self.has_killed:
            self.has_killed = True
            return Due("kill", signals=_all(self.alive, SIGKILL))
        killed = frozenset(self.alive if self.has_killed else ())
        return Due("tick", may_kill=killed)

    def _ended(self, process: int, code: int, now_s: float) -> Due:
        self.alive.discard(process)
        self.idle.discard(process)
        if self.stop_code is not None:
            return Due("stopped", finish=None if self.alive else self.stop_code)
        current = set(self.members.values())
        if self.is_whole and process in current and code:
            self._failed()
        if self.is_whole and current - self.alive:
            return Due("some done") if current & self.alive else self._done(now_s)
        if not self.is_whole:
            self.failures.append(128 - code if code < 0 else code)
        if self.num_failed >= self.script.max_failures:
            return self._stop("loop", self._code(), now_s)
        return self._replaced(now_s)

    def _failed(self) -> None:
        if self.is_new:
            self.failures, self.num_failed = [], 0
            self.late_step, self.has_repeated = (), False
        self.is_whole = self.is_new = False
        self.num_failed += 1
        self.num_ever += 1

    def _done(self, now_s: float) -> Due:
        return self._stop("done", 0, now_s)

    def _code(self) -> int:
        return next((code for code in self.failures if code), 1)

    def _replaced(self, now_s: float) -> Due:
        script = self.script
        recent = [t for t in self.restarts_s if t > now_s - script.window_s]
        missing = script.world_size + script.num_standbys - len(self.alive)
        num = max(0, min(missing, script.max_restarts - len(recent)))
        if len(self.alive) + num < script.world_size:
            return self._stop("limit", self._code(), now_s)
        self.restarts_s += [now_s] * num
        self.in_broken_s += [now_s] * (0 if self.is_whole else num)
        self.events_s += [now_s] * bool(num)
        reason = "limited" if num < missing else "failure"
        return Due(reason, num, self._next())

    def kept(self) -> dict[int, int]:
        """The ranks that have a process."""
        return {rank: p for rank, p in self.members.items() if p in self.alive}

    def _next(self) -> int:
        """The generation that has to be formed now; 0: none."""
        num_empty = self.script.world_size - len(self.kept())
        is_due = not self.is_whole and num_empty <= len(self.idle)
        return self.generation + 1 if is_due else 0

    def _stop(self, reason: str, code: int, now_s: float) -> Due:
        self.stop_code, self.kill_at_s = code, now_s + self.script.grace_s
        self.stop_reason = reason
        if not self.alive:
            return Due(reason, finish=code)
        return Due(reason, signals=_all(self.alive, SIGTERM))

    def is_late(self, now_s: float) -> bool:
        """Whether a Tick should have come, and SIGKILL have been sent."""
        latest_s = self.kill_at_s + self.script.late_s + _LATE_S
        return bool(self.alive) and not self.has_killed and now_s > latest_s

    # ── what was done ───────────────────────────────────────────────────────────────

    def fault(self, due: Due, actions: list[Fact]) -> str:
        """Which part of the actions is not what is due, or "", and take them over."""
        starts = [a[1] for a in actions if a[0] == "start"]
        if len(starts) != due.num_starts:
            return "starts"
        if len({*starts} - self.used) < len(starts):
            return "numbers"
        signals = {(a[1], a[2]) for a in actions if a[0] == "signal"}
        allowed = _all(due.may_kill, SIGKILL)
        if not due.signals <= signals <= due.signals | allowed:
            return "signals"
        if [a[1] for a in actions if a[0] == "finish"] != _list(due.finish):
            return "finish"
        self.used |= set(starts)
        self.alive |= set(starts)
        forms = [a for a in actions if a[0] == "form"]
        if len(forms) != bool(due.form):
            return "form"
        return self._formed(due, dict(forms[0][2]), forms[0][1]) if forms else ""

    def _formed(self, due: Due, members: dict[int, int], generation: int) -> str:
        if generation != due.form:
            return "generation"
        kept = self.kept()
        taken = {r: p for r, p in members.items() if r not in kept}
        if any(members.get(rank) != process for rank, process in kept.items()):
            return "survivors"
        ranks = sorted(members) == list(range(self.script.world_size))
        if not ranks or len(set(taken.values())) < len(taken):
            return "members"
        if not set(taken.values()) <= self.idle:
            return "members"
        self.idle -= set(taken.values())
        self.members, self.generation, self.is_whole = members, generation, True
        return ""


_STALE = Due("stale")


def _all(
    processes: set[int] | frozenset[int], number: int
) -> frozenset[tuple[int, int]]:
    return frozenset((process, int(number)) for process in processes)


def _list(code: int | None) -> list[int]:
    return [] if code is None else [code]
