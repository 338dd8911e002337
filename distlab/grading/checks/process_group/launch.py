"""Checks of 3.18, `process_group.launch`: hundreds of scripts of processes that end."""

from __future__ import annotations

from signal import SIGTERM
from types import ModuleType
from typing import Any

from distlab.comm.services import Tick
from distlab.given.process_group import (
    SIGKILL,
    Begin,
    Ended,
    Interrupted,
    Signal,
    Start,
)
from distlab.grading.checks.process_group.facts import facts, late_facts
from distlab.grading.checks.process_group.lives import (
    BY_HAND,
    NUM_RANDOM,
    SIZES,
    LaunchedProcesses,
    LauncherContract,
    Script,
    scripts,
)
from distlab.grading.clause import clauses
from distlab.grading.kit import launcher_actions
from distlab.grading.kit.histories import (
    History,
    Row,
    compared,
    last_rows,
    rows_of,
)
from distlab.grading.kit.launcher_actions import (
    END,
    Fact,
    asked_s,
    common_fact,
    expect_no_fault,
    first_faults,
    no_tick,
    signal_name,
)
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY, Evidence
from distlab.terminal import ranks_in_words

TASK = "process_group.launch"
_EVENTS = {"begin": Begin, "ended": Ended, "interrupted": Interrupted, "tick": Tick}


def play_lives(
    context: RankContext, unit: ModuleType, seed: int
) -> list[tuple[int, History]]:
    """The first script that breaks each clause: its number, and the actions."""
    return first_faults(
        scripts(seed), lambda script: play_launcher(unit, script), faults
    )


def play_launcher(unit: ModuleType, script: Script) -> History:
    """The events of a script with the launcher's actions, until all is over."""
    launcher = unit.Launcher(
        script.world_size,
        max_restarts=script.max_restarts,
        window_s=script.window_s,
        grace_s=script.grace_s,
    )
    return launcher_actions.play_actions(
        launcher, LaunchedProcesses(script), _EVENTS, _fact
    )


def _fact(action: Any) -> Fact:
    match action:
        case Start(rank, generation):
            return "start", int(rank), int(generation)
        case Signal(rank, number):
            return "signal", int(rank), int(number)
    return common_fact(action)


PLAYED = on_ranks(play_lives)


def _judge(clause_id: str, runs: Runs) -> str | None:
    expect_no_fault(runs, PLAYED, clause_id, scripts(runs.seed), faults)
    first = f"{len(BY_HAND) + NUM_RANDOM} scripts of processes that end"
    return first if clause_id == "C1" else None


clauses(TASK, ("C1", "C2", "C3"), _judge, worlds=(1,), plays=SIZES, runs=[PLAYED])
clauses(
    TASK,
    ("C4",),
    _judge,
    worlds=(1,),
    plays=SIZES,
    runs=[PLAYED],
    after=("C2",),
    own="code-of-the-last",
)


# ── in words ────────────────────────────────────────────────────────────────────────


def faults(script: Script, history: History) -> dict[str, NotYetError]:
    """The first event with other actions than the contract's, and its clause."""
    contract = LauncherContract(script)
    for one in compared(history, contract):
        event = tuple(one.row.request)
        given = sorted(map(tuple, one.row.reply))
        actual = [action for action in given if action[0] != "wake"]
        expected = sorted(one.expected)
        if contract.allows(actual, expected):
            continue
        actual, given = ([], []) if contract.is_late else (actual, given)
        rows, now_s = rows_of(history), one.row.time_s
        slug, rule = _diagnosis(script, rows, one.place, expected, actual)
        if event == ("tick",):
            slug, rule = _of_a_tick(contract, now_s, expected, actual)
        happened = _situation(event, script.world_size, now_s)
        rule = rule or facts(contract, event, now_s, expected, actual)
        if contract.is_late:
            before = rows[: one.place]
            slug, rule = "", late_facts(contract, asked_s(before))
            happened = f"when {no_tick(contract.kill_at_s, before)}"
        elif event == END:
            happened = "when no more events came"
        n = script.world_size
        due = [*expected, *_wake_of(contract, expected)]
        wakes = [action for action in given if action[0] == "wake" and action in due]
        due = [action for action in due if action not in wakes]  # not of interest
        without = [action for action in given if action not in wakes] or given
        did, only = _done(without, event), ""
        if due and set(due) < set(without):  # all of it, and more
            rest = [action for action in without if action not in due]
            did, only = f"also {_done(rest, event)}", "only "
        fault = NotYetError(
            f"{happened}, the launcher {did}, expected {only}{_actions(due)}",
            slug=slug,
            rule=rule,
            played=n,
            evidence=(
                Evidence(NOBODY, "Launcher", _numbers(script)),
                *last_rows(history, _words, one.place - (event == END)),
            ),
        )
        return {_clause(event, expected, actual, contract): fault}
    return {}


def _clause(
    event: Fact, expected: list[Fact], actual: list[Fact], contract: LauncherContract
) -> str:
    wanted, given = ({action[0] for action in acts} for acts in (expected, actual))
    if event == ("begin",) or "unknown" in given or expected == [("finish", 0)]:
        return "C1"
    if contract.was_interrupted:
        return "C4"
    if "signal" in wanted:
        return "C2"
    if "start" in wanted | given:
        return "C3"
    return "C2" if "signal" in given else "C4" if wanted else "C1"


def _wake_of(contract: LauncherContract, expected: list[Fact]) -> list[Fact]:
    """The Tick that must be asked for at some time, beside the first SIGTERM."""
    is_stop = any(action[2] == SIGTERM for action in expected if action[0] == "signal")
    return [("wake", contract.kill_at_s)] if is_stop else []


def _numbers(script: Script) -> str:
    return (
        f"max_restarts={script.max_restarts} window_s={script.window_s:g} "
        f"grace_s={script.grace_s:g}"
    )


def _words(row: Row) -> str:
    return f"{_event(tuple(row.request))}  →  {_actions(row.reply)}"


def _event(event: Fact) -> str:
    match event:
        case ("begin",):
            return "Begin"
        case ("ended", rank, code):
            return f"rank {rank} ended with code {code}"
        case ("interrupted", number):
            return f"the launcher got {signal_name(number)}"
    return "a Tick"


def _situation(event: Fact, n: int, now_s: float) -> str:
    """`after rank 2 of 3 ended with code 1`."""
    match event:
        case ("begin",):
            return f"after Begin with {n} rank{'s' * (n > 1)}"
        case ("ended", rank, code):
            which = f"rank {rank} of {n}" if n > 1 else "the only rank"
            return f"after {which} ended with code {code}"
        case ("interrupted", number):
            return f"after {signal_name(number)} with {n} rank{'s' * (n > 1)}"
    return f"after a Tick at {now_s:.3g} s"


def _done(actions: list[Fact], event: Fact) -> str:
    """The same actions with a verb."""
    if not actions:
        return "returned no action"
    are_starts = all(action[0] == "start" for action in actions)
    if are_starts and event != ("begin",) and len({a[2] for a in actions}) == 1:
        ranks = ranks_in_words([action[1] for action in actions])
        return f"restarted {ranks} in generation {actions[0][2]}"
    if all(action[0] == "signal" for action in actions):
        return f"sent {_actions(actions)}"
    return f"returned {_actions(actions)}"


def _actions(actions: list[Fact]) -> str:
    """Actions of the same kind in one phrase."""
    phrases: dict[str, list[str]] = {}
    for action in actions:
        match action:
            case ("start", rank, generation):
                phrase = f"Start of {{}} in generation {generation}"
                phrases.setdefault(phrase, []).append(f"{rank}")
            case ("signal", rank, number):
                phrase = f"{signal_name(number)} to {{}}"
                phrases.setdefault(phrase, []).append(f"{rank}")
            case ("wake", at_s):
                phrases[f"WakeAt {at_s:.4g} s"] = []
            case ("finish", code):
                phrases[f"Finish({code})"] = []
            case ("unknown", what):
                phrases[what] = []
    texts = [
        phrase.replace("{}", f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}")
        if ranks
        else phrase
        for phrase, ranks in phrases.items()
    ]
    return " and ".join(texts) or "no action"


def _are_kills(actions: list[Fact]) -> bool:
    return {(kind, number) for kind, *_, number in actions} == {("signal", SIGKILL)}


def _of_a_tick(
    contract: LauncherContract, now_s: float, expected: list[Fact], actual: list[Fact]
) -> tuple[str, str]:
    """The same for what was done at a Tick."""
    if not expected and _are_kills(actual) and not contract.has_killed:
        is_past = contract.generation > 1 and now_s >= contract.last_kill_at_s
        if is_past and not contract.cause:
            rule = "a Tick says only that time has passed: a restart forgets kill_at_s"
            return "tick-of-the-past", rule
        return "", "before kill_at_s, do nothing"
    if _are_kills(expected) and not actual and contract.script.late_s:
        return "", "a Tick may come late: compare now_s >= kill_at_s"
    return "", ""


def _diagnosis(
    script: Script,
    rows: list[Row],
    place: int,
    expected: list[Fact],
    actual: list[Fact],
) -> tuple[str, str]:
    """The misconception and what to do, where both are sure."""
    kinds = [{action[0] for action in actions} for actions in (expected, actual)]
    later = [row.reply[0][0] for row in rows[place + 1 :] if row.reply]
    if kinds == [{"finish"}, {"start"}] and later.count("start") > 1:
        return (
            "restart-without-end",
            f"at most {script.max_restarts} restarts in {script.window_s:g} s: keep "
            "the times of the restarts",
        )
    if kinds == [{"finish"}, {"finish"}] and expected[0][1]:
        ends = [row.request for row in rows[: place + 1] if row.request[0] == "ended"]
        codes = [code for _, _, code in ends[-script.world_size :] if code]
        others = {*codes[1:]} - {*codes[:1]}
        if actual[0][1] in others | {128 - code for code in others if code < 0}:
            return (
                "code-of-the-last",
                "the first that failed is the cause; the others were stopped",
            )
    return "", ""
