"""Checks of 3.18, `process_group.launch`: hundreds of scripts of processes that end."""

from __future__ import annotations

import signal

from distlab.grading.checks.process_group.launcher_contract import (
    Difference,
    Fact,
    Row,
    first_difference,
)
from distlab.grading.checks.process_group.launcher_world import play_lives
from distlab.grading.checks.process_group.lives import (
    BY_HAND,
    NUM_RANDOM,
    Script,
    scripts,
)
from distlab.grading.clause import clause
from distlab.grading.kit.plans import worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner.autopsy import NOBODY, Evidence

TASK = "process_group.launch"
PLAYED = [on_ranks(play_lives)]
_SHOWN = 6  # events of the table


def _expect(runs: Runs, clause_id: str) -> None:
    """Raise the verdict on the script that this clause is about, if there is one."""
    for number, listed in worked_out(runs, play_lives).values[0]:
        script = scripts(runs.seed)[number]
        rows = [(now_s, tuple(e), tuple(map(tuple, acts))) for now_s, e, acts in listed]
        difference = first_difference(script, rows)
        if difference and difference.clause == clause_id:
            slug, rule = _diagnosis(script, rows, difference)
            raise NotYetError(
                _sentence(script, rows, difference),
                slug=slug,
                evidence=_table(rows[: difference.row + 1]),
                rule=rule,
            )


@clause(TASK, "C1", worlds=(1,), runs=PLAYED)
def all_start_and_all_end(runs: Runs) -> str | None:
    """V: each rank once in generation 1; exit code 0 when the last has ended."""
    _expect(runs, "C1")
    return f"{len(BY_HAND) + NUM_RANDOM} scripts of processes that end"


@clause(TASK, "C2", worlds=(1,), runs=PLAYED)
def a_failure_stops_the_others(runs: Runs) -> str | None:
    """V: SIGTERM to those alive, once; SIGKILL after grace_s to those alive then."""
    _expect(runs, "C2")
    return None


@clause(TASK, "C3", worlds=(1,), runs=PLAYED)
def restarts_have_a_budget(runs: Runs) -> str | None:
    """V: all ranks again, in the next generation, as often as the window allows."""
    _expect(runs, "C3")
    return None


@clause(TASK, "C4", worlds=(1,), runs=PLAYED)
def the_exit_code_is_true(runs: Runs) -> str | None:
    """V: the first failure's, or the interruption's; nothing starts after that one."""
    _expect(runs, "C4")
    return None


# ── in words ────────────────────────────────────────────────────────────────────────


def _sentence(script: Script, rows: list[Row], difference: Difference) -> str:
    happened = "no event comes any more"
    if difference.row < len(rows):
        at_s, event, _ = rows[difference.row]
        is_late = at_s > difference.now_s
        happened = (
            f"grace_s is over at {difference.now_s:.4g} s"
            if is_late
            else (f"{_event(event)} at {at_s:.4g} s")
        )
    elif difference.now_s:
        happened = f"grace_s is over at {difference.now_s:.4g} s"
    ranks = "1 rank" if script.world_size == 1 else f"{script.world_size} ranks"
    return (
        f"{ranks}, {happened}: expected {_actions(difference.expected)}, but got "
        f"{_actions(difference.actual)}"
    )


def _event(event: Fact) -> str:
    match event:
        case ("begin",):
            return "Begin"
        case ("ended", rank, code):
            return f"rank {rank} ended with code {code}"
        case ("interrupted", number):
            return f"the launcher got {_name(number)}"
    return "a Tick"


def _name(number: object) -> str:
    try:
        return signal.Signals(int(str(number))).name
    except ValueError:
        return f"signal {number}"


def _actions(actions: list[Fact] | tuple[Fact, ...]) -> str:
    """Actions of the same kind in one phrase."""
    phrases: dict[str, list[str]] = {}
    for action in actions:
        match action:
            case ("start", rank, generation):
                phrases.setdefault(f"Start in generation {generation} of", []).append(
                    str(rank)
                )
            case ("signal", rank, number):
                phrases.setdefault(f"{_name(number)} to", []).append(str(rank))
            case ("finish", code):
                phrases.setdefault(f"Finish({code})", [])
            case ("unknown", "None"):
                phrases.setdefault("None, which is no list of actions", [])
            case ("unknown", what):
                phrases.setdefault(f"{what}, which is no action", [])
    texts = [
        f"{phrase} rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}" if ranks else phrase
        for phrase, ranks in phrases.items()
    ]
    return " and ".join(texts) or "no action"


def _table(rows: list[Row]) -> tuple[Evidence, ...]:
    """The last events, with what the launcher did."""
    return tuple(
        Evidence(
            rank=NOBODY,
            state=f"{at_s:.4g} s",
            text=f"{_event(event)}  →  {_actions(actions)}",
        )
        for at_s, event, actions in rows[-_SHOWN:]
    )


def _diagnosis(
    script: Script, rows: list[Row], difference: Difference
) -> tuple[str, str]:
    """The misconception and what to do, where both are sure."""
    expected, actual = difference.expected, difference.actual
    kinds = [{action[0] for action in actions} for actions in (expected, actual)]
    more = [
        acts
        for *_, acts in rows[difference.row + 1 :]
        if acts and acts[0][0] == "start"
    ]
    if kinds == [{"finish"}, {"start"}] and len(more) > 1:
        return (
            "restart-without-end",
            f"at most {script.max_restarts} restarts in {script.window_s:g} s: keep "
            "the times of the restarts",
        )
    if kinds == [{"finish"}, {"finish"}] and expected[0][1]:
        ended = [int(e[2]) for _, e, _ in rows[: difference.row + 1] if e[0] == "ended"]
        first, *later = [code for code in ended[-script.world_size :] if code]
        others = {*later} - {first}
        if actual[0][1] in others | {128 - code for code in others if code < 0}:
            return (
                "code-of-the-last",
                "the first that failed is the cause; the others were stopped",
            )
    has_kill = {action[-1] for action in actual} == {int(signal.SIGKILL)}
    if not expected and has_kill and not difference.has_cause:
        return (
            "tick-of-the-past",
            "a Tick says only that time has passed: a restart forgets kill_at_s",
        )
    return "", ""
