"""Scripts of processes that end, played to what starts them: a launcher, a supervisor.

Both have a method `on(event, now_s)`, which returns actions. No process runs: the
`ScriptedProcesses` say which events come, when, given the actions. In a history,
events and actions are tuples, their kind first.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from distlab.comm.services import WakeAt
from distlab.given.process_group import Finish
from distlab.grading.kit.histories import (
    Faults,
    History,
    Row,
    expect,
    first_by_clause,
)
from distlab.grading.kit.plans import in_call
from distlab.grading.runs import Runs, RunSpec
from distlab.runner.autopsy import NOBODY

Fact = tuple[Any, ...]
"""An event or an action: what it is, and its numbers."""
END: Fact = ("end",)
"""The last row of a history, where nothing happens any more."""
_AFTER_ALL_S = 1e6  # when that row is, after the last event
_MOST_EVENTS = 400


class ScriptedProcesses(Protocol):
    """What becomes of the processes of one script."""

    @property
    def now_s(self) -> float:
        """When the latest event came."""

    def events(self) -> Iterator[Fact]:
        """One after another, at `now_s`, while any comes."""

    def act(self, action: Fact) -> None:
        """Do what was asked for."""


def play_actions(
    subject: Any,
    processes: ScriptedProcesses,
    events: Mapping[str, Callable[..., Any]],
    fact_of: Callable[[Any], Fact],
    can_act: Callable[[list[Fact]], bool] = lambda _: True,
) -> History:
    """The events of a script with the subject's actions, until all is over.

    `events` makes an event of its numbers, by its kind; `fact_of` reads an action. An
    unknown action ends the history, and so do actions that `can_act` rules out.
    """
    rows = []
    for event in processes.events():
        kind, *values = event
        happened = events[kind](*values)
        with in_call(f"on({happened}, {processes.now_s:.4g})"):
            given = subject.on(happened, processes.now_s)
        actions = _read(given, fact_of)
        rows.append(Row(processes.now_s, NOBODY, event, actions))
        is_known = "unknown" not in {kind for kind, *_ in actions}
        if len(rows) >= _MOST_EVENTS or not (is_known and can_act(actions)):
            return rows
        for action in actions:
            processes.act(action)
    return [*rows, Row(processes.now_s + _AFTER_ALL_S, NOBODY, END, [])]


def _read(given: Any, fact_of: Callable[[Any], Fact]) -> list[Fact]:
    if not isinstance(given, list | tuple):
        return [("unknown", f"{given!r:.60}, which is no list of actions")]
    return [fact_of(action) for action in given]


def common_fact(action: Any) -> Fact:
    """An action that a launcher and a supervisor share; else "unknown"."""
    match action:
        case WakeAt(at_s):
            return "wake", float(at_s)
        case Finish(code):
            return "finish", int(code)
    return "unknown", f"{action!r:.60}, which is no action"


def asked_s(rows: Sequence[Row]) -> list[float]:
    """For when a Tick was asked for."""
    return [at_s for row in rows for kind, at_s, *_ in row.reply if kind == "wake"]


def no_tick(due_s: float, rows: Sequence[Row]) -> str:
    """The headline where none came when it was due; `rows` are those before."""
    asked = asked_s(rows)
    last = (
        f"the last WakeAt is for {asked[-1]:.4g} s" if asked else "none was asked for"
    )
    return f"no Tick came at {due_s:.4g} s ({last})"


def signal_name(number: int) -> str:
    """`SIGTERM`."""
    known = {one.value: one.name for one in signal.Signals}
    return known.get(number, f"signal {number}")


def first_faults(
    scripts: Sequence[Any],
    play_one: Callable[[Any], History],
    faults: Faults[Any],
) -> list[tuple[int, History]]:
    """In the rank: the first script that breaks each clause, by number, played."""
    return first_by_clause(
        range(len(scripts)),
        lambda number: play_one(scripts[number]),
        lambda number, history: faults(scripts[number], history),
    )


def expect_no_fault(
    runs: Runs,
    spec: RunSpec,
    clause_id: str,
    scripts: Sequence[Any],
    faults: Faults[Any],
) -> None:
    """In the judge: what `first_faults` kept says nothing against this clause.

    Raises:
        NotYetError: it does.
    """
    expect(runs, spec, clause_id, lambda number, rows: faults(scripts[number], rows))
