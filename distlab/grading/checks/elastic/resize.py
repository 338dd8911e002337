"""Checks of 4.9, `elastic.resize`: scripts by hand, and of faults in virtual time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from distlab.grading.checks.elastic.facts import facts
from distlab.grading.checks.elastic.scripts import (
    BY_HAND,
    END,
    NUM_RANDOM,
    SIZES,
    ByHand,
    MembershipContract,
    Script,
    Seen,
    play_agents,
    scripts,
    settings,
    shorter,
)
from distlab.grading.checks.elastic.sentences import Difference, situation
from distlab.grading.checks.elastic.world import Fact, Settings
from distlab.grading.clause import clauses
from distlab.grading.kit.histories import (
    History,
    Row,
    expect,
    first_by_clause,
    last_rows,
    rows_of,
)
from distlab.grading.kit.plans import in_call
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY, Evidence
from distlab.sim import script_text

TASK = "elastic.resize"
What = tuple[str, dict[str, Any]]
"""A script as text, and what the Membership is made with."""


def play_scripts(
    context: RankContext, unit: ModuleType, seed: int
) -> list[tuple[What, History]]:
    """For each clause a short script that breaks it, and its history."""

    def played(script: Script) -> History:
        with in_call(f"the script {text_of(script)}"):
            return play_agents(script, unit)

    found = first_by_clause(scripts(seed), played, _faults_of, shorter)
    return [(_what(script), history) for script, history in found]


def text_of(script: Script) -> str:
    """A script on one line."""
    if isinstance(script, ByHand):
        return ", ".join(script.events)
    return script_text(script) or "no fault"


def _what(script: Script) -> What:
    return text_of(script), vars(settings(script))


def _faults_of(script: Script, history: History) -> dict[str, NotYetError]:
    return faults(_what(script), history)


PLAYED = on_ranks(play_scripts)


def _judge(clause_id: str, runs: Runs) -> str | None:
    expect(runs, PLAYED, clause_id, faults)
    first = f"{len(BY_HAND)} scripts by hand, {NUM_RANDOM} of faults in virtual time"
    return first if clause_id == "C1" else None


clauses(
    TASK,
    ("C1", "C2", "C3", "C4", "C5", "C6"),
    _judge,
    worlds=(1,),
    plays=SIZES,
    runs=[PLAYED],
)


# ── what is wrong ───────────────────────────────────────────────────────────────────


def faults(what: What, history: History) -> dict[str, NotYetError]:
    """The first event with other actions than the contract's, and its clause."""
    rows = rows_of(history)
    for agent in sorted({row.peer for row in rows}):
        own = [row for row in rows if row.peer == agent]
        if found := _first(what, own):
            return found
    return {}


def _first(what: What, rows: list[Row]) -> dict[str, NotYetError]:
    text, own = what
    contract = MembershipContract(Settings(**own))
    for place, row in enumerate(rows):
        event, actual = tuple(row.request), [tuple(action) for action in row.reply]
        if contract.is_overdue(row.time_s):
            event, actual = ("tick",), []
            row = Row(contract.deadline_s, row.peer, event, actual)
            contract.is_late = True
        elif not contract.could_happen(event):
            return {}
        asked_before_s, happened = contract.deadline_s, situation(contract, event)
        expected = contract.offer(row)
        wakes = [action for action in actual if action[0] == "wake"]
        actual = [action for action in actual if action[0] != "wake"]
        was_asked_alone = contract.asked_alone
        if wakes:
            contract.asked_alone = is_alone(contract.seen)
        if not contract.is_late and _agree(expected, actual, contract):
            continue
        earlier = [action for row in rows[:place] for action in row.reply]
        contract.has_asked = any(action[0] == "wake" for action in earlier)
        contract.asked_alone = was_asked_alone
        clause_id, slug, rule = _diagnosis(contract, event, expected, actual)
        is_none = event == END or contract.is_late  # no event decides
        # When to wake it is not compared, but it is due where a new wait begins.
        due = [*expected]
        if contract.deadline_s not in (asked_before_s, math.inf):
            due.append(("wake", contract.deadline_s))
        shown = [row._replace(peer=NOBODY) for row in rows]
        numbers = ", ".join(f"{name} {value:g}" for name, value in own.items())
        told = [*rows[:place], row]
        difference = Difference(
            contract, happened, due, actual, wakes, told, row.time_s
        )
        fault = NotYetError(
            difference.sentence(),
            slug=slug,
            rule=rule or facts(contract, event, expected, actual),
            evidence=(
                Evidence(NOBODY, "made with", numbers),
                Evidence(NOBODY, "script", text),
                *last_rows(shown, _words, place - is_none, beside=2),
            ),
        )
        return {clause_id: fault}
    return {}


def _agree(
    expected: list[Fact], actual: list[Fact], contract: MembershipContract
) -> bool:
    """Whether the actions are as due; if so, the contract takes over the ranks."""
    if sorted(map(_plain, expected)) != sorted(map(_plain, actual)):
        return False
    forms = [one for one in (*expected, *actual) if one[0] == "form"]
    if not forms:
        return True
    due, given = forms
    is_right = not _flaw(due, given)
    if is_right:
        contract.members = [member for _, member in given[2]]
    return is_right


def is_alone(seen: Seen) -> bool:
    """Whether min_members have joined, and others may be as many or more."""
    return seen.has_enough and not seen.is_majority


def _plain(action: Fact) -> str:
    """What must be equal at first sight: not a reason, not the ranks of a Form."""
    kind, what, *_ = (*action, "")
    return kind if kind == "stop" else f"{kind} {what}"


def _flaw(due: Fact, given: Fact) -> str:
    """The clause that a Form breaks, or nothing."""
    _, generation, old, taken, sources, steps = due
    ranks, members = [rank for rank, _ in given[2]], [m for _, m in given[2]]
    if generation != given[1]:
        return "C1"
    is_right = ranks == [*range(len(taken))] and sorted(members) == sorted(taken)
    if not is_right or {*members[: len(old)]} != {*old} or given[4] != steps:
        return "C2"
    return "" if given[3] in sources else "C3"


def _diagnosis(
    contract: MembershipContract, event: Fact, expected: list[Fact], actual: list[Fact]
) -> tuple[str, str, str]:
    """The clause; and a slug and a rule, where they are sure."""
    wanted, given = ({one[0] for one in acts} for acts in (expected, actual))
    own = [any(a[:2] == ("refuse", *event[1:2]) for a in b) for b in (expected, actual)]
    if "unknown" in given:
        return "C1", "", "return a list of Regroup, Form, Refuse, WakeAt and Stop"
    if event[0] == "join" and own[0] != own[1] and not contract.is_late:
        is_stale = own[0] and event[3] > 0 and event[1] not in contract.ended
        rule = "compare its generation with the current one first"
        return "C4", "stale-member" * is_stale, rule * is_stale
    if "form" in wanted & given:
        due, form = (
            next(one for one in acts if one[0] == "form") for acts in (expected, actual)
        )
        return _of_form(contract.seen, due, form)
    asked = [[one for one in b if one[0] == "regroup"] for b in (expected, actual)]
    if asked[0] != asked[1]:
        return "C1", "", ""
    return _of_time(contract, event, wanted, given)


def _of_time(
    contract: MembershipContract, event: Fact, wanted: set[str], given: set[str]
) -> tuple[str, str, str]:
    """The same for a Form or a Stop that comes too early, too late, or not at all."""
    seen = contract.seen
    # Who asks for a Tick without a majority may form too early when there is one.
    if "form" in given and (is_alone(seen) or contract.asked_alone):
        rule = "more of the last generation must have joined than are unheard"
        return "C6", "two-majorities", rule
    if seen.is_disputed:
        return "C6", "", ""
    is_ignored = event == ("tick",) and not contract.is_late and not given
    if "form" in wanted and (is_ignored or not contract.has_asked):
        rule = "ask for a Tick when a Form becomes possible, and form at it"
        return "C5", "waits-for-max", rule
    return "C5", "", ""


def _of_form(seen: Seen, due: Fact, given: Fact) -> tuple[str, str, str]:
    """The same for a Form that differs from the one that is due."""
    clause_id = _flaw(due, given) or "C2"
    taken, steps = due[3], due[5]
    ranks, members = [rank for rank, _ in given[2]], [m for _, m in given[2]]
    if clause_id == "C2" and {*members} == {*taken} and ranks != [*range(len(taken))]:
        return "C2", "rank-is-a-name", "the ranks of n members are 0 … n - 1"
    if clause_id == "C2" and {*members} == {*taken} and given[4] != steps:
        rule = "⌈⌈G / n⌉ / microbatch_size⌉ steps, with the n of this generation"
        return "C2", "global-batch-scaled" * (given[4] < steps), rule
    if not _flaw(due, given):
        return "C2", "", "each that has joined above max_members gets a Refuse"
    if clause_id == "C2" and {*members} - {*seen.joined}:
        rule = "take only members that have joined this round and were not lost since"
        return "C2", "", rule
    if clause_id == "C2":
        rule = "first those of the last generation, then new ones as they joined"
        return "C2", "", rule
    if clause_id != "C3":
        return clause_id, "", ""
    if seen.members and given[3] not in seen.members:
        rule = "a member that was not in the last generation has not its state"
        return "C3", "newcomer-is-source", rule
    rule = "compare the steps of their Joins: ranks may be one step apart"
    return "C3", "rank-0-is-source" * (given[3] in members[:1]), rule


# ── in words ────────────────────────────────────────────────────────────────────────


def _words(row: Row) -> str:
    return f"{_event(row, is_timed=False)}  →  {_actions(row.reply)}"


def _event(row: Row, *, is_timed: bool = True) -> str:
    at = f" at {row.time_s:.4g} s" if is_timed else ""
    match tuple(row.request):
        case ("join", member, step, generation):
            return f"Join({member}, step {step}, generation {generation}){at}"
        case ("lost", member, ended):
            return f"Lost({member}{'' if ended else ', not ended'}){at}"
        case ("end",):
            return "no event comes any more"
    return f"Tick{at}"


def _actions(actions: Sequence[Sequence[Any]]) -> str:
    return " and ".join(map(_action, actions)) or "no action"


def _action(action: Sequence[Any]) -> str:
    match tuple(action):
        case ("regroup", members):
            return f"Regroup({', '.join(members)})"
        case ("form", generation, _, taken, sources, steps):
            return _formed(generation, enumerate(taken), " or ".join(sources), steps)
        case ("form", generation, pairs, source, steps):
            return _formed(generation, pairs, source, steps)
        case ("refuse", member, *_):
            return f"Refuse({member})"
        case ("wake", at_s):
            return f"WakeAt({at_s:.4g})"
        case ("stop", *_):
            return "Stop"
    return str(action[1])


def _formed(
    generation: Any, pairs: Iterable[Sequence[Any]], source: str, steps: Any
) -> str:
    ranks = ", ".join(f"{rank} {member}" for rank, member in pairs)
    num = f"{steps} step{'s' * (steps != 1)} of accumulation"
    return f"Form({generation}: {ranks}; source {source}; {num})"
