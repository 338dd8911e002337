"""Checks of 3.17, `process_group.rendezvous`: hundreds of scripts of messages."""

from __future__ import annotations

from typing import Any

from distlab.grading.checks.process_group.requests import (
    BY_HAND,
    DONE,
    ERROR,
    NUM_RANDOM,
    RANK,
    REFUSED,
    Difference,
    Replies,
    Script,
    first_difference,
    play_scripts,
    text_of,
)
from distlab.grading.clause import clause
from distlab.grading.kit.plans import worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner.autopsy import NOBODY, Evidence

TASK = "process_group.rendezvous"
PLAYED = [on_ranks(play_scripts)]
NOTE = f"{len(BY_HAND) + NUM_RANDOM} scripts of messages"


def _expect(runs: Runs, clause_id: str) -> None:
    """Raise the verdict on the script that this clause is about, if there is one."""
    for (world_size, steps), listed in worked_out(runs, play_scripts).values[0]:
        script = world_size, tuple(steps)
        replies = [dict(some) for some in listed]
        difference = first_difference(script, replies)
        if difference and difference.clause == clause_id:
            slug, rule = _diagnosis(script, difference)
            raise NotYetError(
                _sentence(script, difference),
                slug=slug,
                evidence=_table(script, replies),
                rule=rule,
            )


@clause(TASK, "C1", worlds=(1,), runs=PLAYED)
def the_store_replies(runs: Runs) -> str | None:
    """V: set, get, add and compare_set, beside the contract."""
    _expect(runs, "C1")
    return NOTE


@clause(TASK, "C2", worlds=(1,), runs=PLAYED)
def what_is_not_there_is_waited_for(runs: Runs) -> str | None:
    """V: get and wait are answered after the message that brings the last value."""
    _expect(runs, "C2")
    return None


@clause(TASK, "C3", worlds=(1,), runs=PLAYED)
def names_become_ranks(runs: Runs) -> str | None:
    """V: 0 … n - 1, each once, when all n are there; asked again, the same."""
    _expect(runs, "C3")
    return None


@clause(TASK, "C4", worlds=(1,), runs=PLAYED)
def generations_are_apart(runs: Runs) -> str | None:
    """V: an older one is refused and changes nothing; a newer one begins empty."""
    _expect(runs, "C4")
    return None


# ── in words ────────────────────────────────────────────────────────────────────────


def _sentence(script: Script, difference: Difference) -> str:
    world_size, steps = script
    asked, after = steps[difference.asked], steps[difference.after]
    when = ""
    if difference.after != difference.asked:
        when = f" after `{text_of(after)}`"
        when += f" of generation {after['generation']}" * _has_generations(script)
    whose = f" of generation {asked['generation']}" * _has_generations(script)
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return (
        f"{ranks}, message {difference.asked + 1}, `{text_of(asked)}`{whose}{when}: "
        f"expected {difference.note or _worded(difference.expected)}, but got "
        f"{_worded(difference.actual)}"
    )


def _worded(reply: Any) -> str:
    if reply is None:
        return "no reply yet"
    is_said = reply in (DONE, RANK, REFUSED) or str(reply).startswith(ERROR)
    return reply if is_said else f"{reply!r}"


def _has_generations(script: Script) -> bool:
    return len({step["generation"] for step in script[1]}) > 1


def _table(script: Script, replies: Replies) -> tuple[Evidence, ...]:
    """Each message with its reply, and after which message that came."""
    rows = []
    for number, step in enumerate(script[1]):
        text = "not answered"
        for after, some in enumerate(replies):
            if number in some:
                text = _worded(some[number])
                text += f", after message {after + 1}" * (after > number)
        own = f"generation {step['generation']}  " * _has_generations(script)
        line = f"{own}{text_of(step)}  →  {text}"
        rows.append(Evidence(rank=NOBODY, state=f"message {number + 1}", text=line))
    return tuple(rows)


def _diagnosis(script: Script, difference: Difference) -> tuple[str, str]:
    """The misconception and what to do, where both are sure."""
    steps = script[1]
    asked = steps[difference.asked]
    before = steps[: difference.after + 1]
    actual, expected = difference.actual, difference.expected
    is_old = asked["generation"] < max(step["generation"] for step in before)
    if difference.clause == "C4" and is_old and actual not in (REFUSED, None):
        return (
            "stale-generation",
            "compare the message's generation first, whatever the operation is",
        )
    if difference.clause == "C3" and expected is None and type(actual) is int:
        names = {step["key"] for step in before if step["op"] == "join"}
        if len(names) < script[0] and len(before) > 1:
            return (
                "counted-twice",
                "count names, not messages: a message that waits is offered again",
            )
    if difference.clause == "C2" and expected is None and actual is not None:
        return "answered-too-early", "return None while a value is missing"
    return "", ""
