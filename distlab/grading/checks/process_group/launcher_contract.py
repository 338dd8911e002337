"""What a launcher must do in a script of 3.18, and where another one does otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from signal import SIGKILL, SIGTERM
from typing import Any

from distlab.grading.checks.process_group.lives import FOREVER, Script

Fact = tuple[Any, ...]
"""An event or an action: what it is, and its numbers."""
Row = tuple[float, Fact, tuple[Fact, ...]]
"""When, the event, and the launcher's actions."""


class Expected:
    """The contract, as a launcher of its own; `WakeAt` is left to the learner."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.generation, self.cause = 0, 0
        self.alive: set[int] = set()
        self.kill_at_s = FOREVER
        self.was_interrupted = self.has_killed = False
        self.restarts_s: list[float] = []

    def on(self, event: Fact, now_s: float) -> list[Fact]:
        """The actions."""
        match event:
            case ("begin",):
                return self._all()
            case ("ended", rank, code):
                self.alive.discard(rank)
                signals = self._stop(code, now_s) if code else []
                return signals if self.alive else self._next(now_s)
            case ("interrupted", number):
                self.was_interrupted = True
                return self._stop(-number, now_s)
        if now_s >= self.kill_at_s:
            self.kill_at_s, self.has_killed = FOREVER, True
            return [("signal", rank, int(SIGKILL)) for rank in sorted(self.alive)]
        return []

    def _all(self) -> list[Fact]:
        self.generation, self.cause, self.kill_at_s = self.generation + 1, 0, FOREVER
        self.has_killed = False
        self.alive = set(range(self.script.world_size))
        return [("start", rank, self.generation) for rank in sorted(self.alive)]

    def _stop(self, code: int, now_s: float) -> list[Fact]:
        if self.cause:
            return []
        self.cause, self.kill_at_s = code, now_s + self.script.grace_s
        return [("signal", rank, int(SIGTERM)) for rank in sorted(self.alive)]

    def _next(self, now_s: float) -> list[Fact]:
        recent = [t for t in self.restarts_s if t > now_s - self.script.window_s]
        is_over = self.was_interrupted or len(recent) >= self.script.max_restarts
        if not self.cause or is_over:
            return [("finish", self.cause if self.cause >= 0 else 128 - self.cause)]
        self.restarts_s.append(now_s)
        return self._all()


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first event with other actions than the contract's."""

    row: int  # of the event; one more than the last: it should have come
    now_s: float
    expected: list[Fact]
    actual: list[Fact]
    clause: str
    has_cause: int  # the code that stopped the generation, or 0
    restarts_s: tuple[float, ...]  # before this event


def first_difference(script: Script, rows: Sequence[Row]) -> Difference | None:
    """Where the actions leave the contract, and which clause that is about."""
    contract = Expected(script)
    for number, (now_s, event, given) in enumerate(rows):
        late_s = contract.kill_at_s if contract.alive else FOREVER
        before = tuple(contract.restarts_s)
        actual = sorted(action for action in given if action[0] != "wake")
        if now_s > late_s + 0.1:
            expected, actual, now_s = contract.on(("tick",), late_s), [], late_s
        else:
            expected = sorted(contract.on(event, now_s))
        if actual != expected and not _is_free(contract, expected, actual):
            return Difference(
                row=number,
                now_s=now_s,
                expected=expected,
                actual=actual,
                clause=_clause(event, expected, actual, contract),
                has_cause=contract.cause,
                restarts_s=before,
            )
    if contract.alive and contract.kill_at_s < FOREVER:
        return Difference(
            row=len(rows),
            now_s=contract.kill_at_s,
            expected=contract.on(("tick",), contract.kill_at_s),
            actual=[],
            clause="C2",
            has_cause=contract.cause,
            restarts_s=tuple(contract.restarts_s),
        )
    return None


def _is_free(contract: Expected, expected: list[Fact], actual: list[Fact]) -> bool:
    """Whether these actions are as right as those of the contract."""
    if not expected and contract.has_killed:  # another SIGKILL for the same ranks
        return all(
            kind == "signal" and rest[0] in contract.alive and rest[1] == SIGKILL
            for kind, *rest in actual
        )
    # A failure and an interruption at once: the code of either is right.
    codes = {128 + int(number) for _, number in contract.script.interrupts}
    kinds = [action[0] for action in (*expected, *actual)]
    ends = contract.was_interrupted and kinds == ["finish", "finish"]
    return ends and actual[0][1] in codes


def _clause(
    event: Fact,
    expected: list[Fact],
    actual: list[Fact],
    contract: Expected,
) -> str:
    wanted = {action[0] for action in expected}
    given = {action[0] for action in actual}
    if event == ("begin",) or "unknown" in given or expected == [("finish", 0)]:
        return "C1"
    if contract.was_interrupted:
        return "C4"
    if "signal" in wanted:
        return "C2"
    if "start" in wanted | given:
        return "C3"
    return "C2" if "signal" in given else "C4" if wanted else "C1"
