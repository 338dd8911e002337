"""A script of 4.7 in words: its events and actions, and which rows are shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from signal import SIGTERM
from typing import Any

from distlab.given.process_group import SIGKILL
from distlab.grading.checks.recovery.contract import SupervisorContract
from distlab.grading.checks.recovery.faults import Script
from distlab.grading.kit.histories import Row
from distlab.grading.kit.launcher_actions import Fact, signal_name
from distlab.runner.autopsy import NOBODY, Evidence

_SHOWN = 7  # rows of a history, beside the line with the supervisor's numbers


def evidence(
    script: Script, rows: Sequence[Row], cause: Fact = ()
) -> tuple[Evidence, ...]:
    """The supervisor's numbers, and the rows up to the last one; `cause` is kept.

    Where earlier rows are left out, a line says what there was after them.
    """
    found = [Evidence(NOBODY, "Supervisor", _numbers(script))]
    groups = _groups(rows)
    if len(groups) > _SHOWN:
        kept = [group for group in groups if cause and cause in map(_request, group)]
        shown = groups[len(kept) + 1 - _SHOWN :]
        found += [_line(group) for group in kept if group not in shown]
        found.append(_then(script, rows[: len(rows) - sum(map(len, shown))]))
        groups = shown
    return (*found, *map(_line, groups))


def _request(row: Row) -> Fact:
    return tuple(row.request)


def _groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Steps of one generation that follow each other are one line; the last is not."""

    def kind(pair: tuple[int, Row]) -> tuple[Any, ...]:
        place, row = pair
        event = _request(row)
        is_plain = event[0] == "completed" and not row.reply and place < len(rows) - 1
        return ("completed", event[2]) if is_plain else (place,)

    return [[row for _, row in group] for _, group in groupby(enumerate(rows), kind)]


def _then(script: Script, rows: Sequence[Row]) -> Evidence:
    """What there was after these rows."""
    contract = SupervisorContract(script)
    for row in rows:
        due = contract.due(_request(row), row.time_s)
        contract.fault(due, [tuple(action) for action in row.reply])
    ranks = ", ".join(f"{r}: {p}" for r, p in sorted(contract.kept().items()))
    text = f"generation {contract.generation}, ranks {{{ranks}}}"
    if contract.idle:
        text += f", ready: {', '.join(map(str, sorted(contract.idle)))}"
    text += f"; after {len(rows)} event{'s' * (len(rows) > 1)}"
    return Evidence(NOBODY, f"{rows[-1].time_s:.4g} s", text)


def _line(group: Sequence[Row]) -> Evidence:
    first, last = group[0], group[-1]
    state = f"{last.time_s:.4g} s"
    text = f"{event_words(_request(last))}  →  {action_words(last.reply)}"
    if len(group) > 1:
        state = f"{first.time_s:.4g} … {last.time_s:.4g} s"
        (_, begin, generation), (_, end, _) = _request(first), _request(last)
        steps = f"steps {begin} … {end}" if begin < end else f"step {begin}, copies:"
        text = f"{steps} completed in generation {generation}  →  no action"
    return Evidence(NOBODY, state, text)


def _numbers(script: Script) -> str:
    return (
        f"max_restarts={script.max_restarts} window_s={script.window_s:g} "
        f"max_failures={script.max_failures} grace_s={script.grace_s:g}"
    )


def event_words(event: Fact) -> str:
    """An event, as a clause."""
    match event:
        case ("ready", process):
            return f"process {process} is ready"
        case ("ended", process, code):
            return f"process {process} ended with code {code}"
        case ("frozen", process, generation):
            return f"process {process} is frozen in generation {generation}"
        case ("completed", step, generation):
            return f"step {step} completed in generation {generation}"
        case ("interrupted", number):
            return f"the agent got {signal_name(number)}"
        case ("begin",):
            return "Begin"
    return "a Tick"


def _processes(numbers: Sequence[int]) -> str:
    return f"process{'es' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def action_words(actions: Sequence[Sequence[Any]]) -> str:
    """Actions of the same kind in one phrase."""
    starts = [a[1] for a in actions if a[0] == "start"]
    found = [f"Start of {_processes(starts)}"] if starts else []
    for number in (SIGTERM, SIGKILL):
        to = [a[1] for a in actions if a[0] == "signal" and a[2] == number]
        found += [f"{signal_name(number)} to {_processes(to)}"] if to else []
    others = Counter(a[2] for a in actions if a[0] == "signal")
    found += [signal_name(s) for s in others if s not in (SIGTERM, SIGKILL)]
    for kind, *values in actions:
        if kind == "form":
            members = ", ".join(f"{rank}: {p}" for rank, p in values[1])
            found.append(f"Form({values[0]}, {{{members}}})")
        elif kind == "wake":
            found.append(f"WakeAt {values[0]:.4g} s")
        elif kind == "finish":
            found.append(f"Finish({values[0]})")
    return " and ".join(found) or "no action"
