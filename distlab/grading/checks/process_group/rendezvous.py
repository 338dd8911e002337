"""Checks of 3.17, `process_group.rendezvous`: hundreds of scripts of messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from distlab.grading.checks.process_group.scripts import (
    BY_HAND,
    DONE,
    NUM_RANDOM,
    REFUSED,
    SIZES,
    Rank,
    RendezvousContract,
    Script,
    is_due,
    request_of,
    scripts,
    shorter,
    text_of,
)
from distlab.grading.clause import clauses
from distlab.grading.kit.histories import (
    Compared,
    History,
    Row,
    compared,
    expect,
    first_by_clause,
    last_rows,
    rows_of,
)
from distlab.grading.kit.services import Ask, Codec, played_by_hand
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext

TASK = "process_group.rendezvous"


def _reply_of(reply: bytes) -> Any:
    read = json.loads(reply)
    return REFUSED if "refused" in read else read["reply"]


CODEC = Codec(json.loads, _reply_of)


def play_scripts(
    context: RankContext, unit: ModuleType, seed: int
) -> list[tuple[Script, History]]:
    """The first script that breaks each clause, without what it does not need."""

    def play(script: Script) -> History:
        sent: list[dict[str, Any]] = []

        def steps() -> Iterator[Ask]:
            # No message has a rank: each comes from a caller of its own, -2, -3, ...
            for number, request in enumerate(map(request_of, script[1])):
                sent.append(request)
                yield Ask(-2 - number, json.dumps(request).encode())

        try:
            return played_by_hand(lambda _: unit.Rendezvous(script[0]), steps(), CODEC)
        except Exception as error:
            error.args = (f"{error}, after {_listed(sent)}",)
            raise

    return first_by_clause(scripts(seed), play, faults, shorter)


PLAYED = on_ranks(play_scripts)


def _judge(clause_id: str, runs: Runs) -> str | None:
    expect(runs, PLAYED, clause_id, faults)
    first = f"{len(BY_HAND) + NUM_RANDOM} scripts of messages"
    return first if clause_id == "C1" else None


clauses(TASK, ("C1", "C2", "C3"), _judge, worlds=(1,), plays=SIZES, runs=[PLAYED])
clauses(
    TASK,
    ("C4",),
    _judge,
    worlds=(1,),
    plays=SIZES,
    runs=[PLAYED],
    after=("C1", "C2", "C3"),
    own="stale-generation",
)


# ── in words ────────────────────────────────────────────────────────────────────────


def faults(script: Script, history: History) -> dict[str, NotYetError]:
    """The first reply that is not due, and the clause that it is about."""
    for wrong in compared(history, RendezvousContract(script[0])):
        if not is_due(wrong.row.reply, wrong.expected):
            seen = rows_of(history)[: wrong.place + 1]
            return _fault(script[0], seen, wrong)
    return {}


def _fault(n: int, seen: list[Row], wrong: Compared) -> dict[str, NotYetError]:
    row, expected = wrong.row, wrong.expected
    newest = min(seen, key=lambda row: row.peer)  # callers count down
    has_generations = len({row.request["generation"] for row in seen}) > 1

    shows_generation = _shows_generation([row.request for row in seen])

    def named(row: Row) -> str:
        return _named(row.request, shows_generation)

    name = _clause(has_generations, row, expected)
    after = f" after {named(newest)}" if newest.peer < row.peer else ""
    slug, rule = _diagnosis(name, n, seen, wrong)
    rule = rule or _fact(n, seen, wrong)
    ranks = "1 rank" if n == 1 else f"{n} ranks"
    due = expected.words if isinstance(expected, Rank) else _worded(expected)
    return {
        name: NotYetError(
            f"with {ranks}, the rendezvous {_replied(row.reply, named(row))}{after}, "
            f"expected {due}",
            slug=slug,
            evidence=last_rows(seen, lambda r: f"{named(r)}  →  {_worded(r.reply)}"),
            rule=rule,
            played=n,
        )
    }


def _listed(requests: list[dict[str, Any]]) -> str:
    shows = _shows_generation(requests)
    return ", ".join(_named(request, shows) for request in requests)


def _shows_generation(requests: list[dict[str, Any]]) -> bool:
    return any(request["generation"] != 1 for request in requests)


def _named(request: dict[str, Any], shows_generation: bool) -> str:
    generation = f" in generation {request['generation']}"
    return f"`{text_of(request)}`{generation * shows_generation}"


def _clause(has_generations: bool, row: Row, expected: Any) -> str:
    if has_generations:
        return "C4"
    if row.request["op"] == "join":
        return "C3"
    is_late = row.request["op"] in ("get", "wait") and None in (expected, row.reply)
    return "C2" if is_late else "C1"


def _worded(reply: Any) -> str:
    if reply is None:
        return "no reply yet"
    return reply[0] if reply in (DONE, REFUSED) else f"{reply!r}"


def _replied(reply: Any, message: str) -> str:
    if reply is None:
        return f"didn't answer {message}"
    if reply == REFUSED:
        return f"refused {message}"
    return f"answered {message} with {_worded(reply)}"


def _diagnosis(name: str, n: int, seen: list[Row], wrong: Compared) -> tuple[str, str]:
    """The misconception and what to do, where both are sure."""
    row, newest = wrong.row, max(row.request["generation"] for row in seen)
    is_old = row.request["generation"] < newest
    if name == "C4" and is_old and row.reply not in (None, REFUSED):
        rule = "compare the message's generation first, whatever the operation is"
        return "stale-generation", rule
    if name == "C3" and wrong.expected is None and type(row.reply) is int:
        names = {row.request["key"] for row in seen if row.request["op"] == "join"}
        if len(names) < n and len(seen) > 1:
            rule = "count names, not messages: a message that waits is offered again"
            return "counted-twice", rule
    if name == "C2" and wrong.expected is None:
        return "answered-too-early", "return None while a value is missing"
    return "", ""


def _fact(n: int, seen: list[Row], wrong: Compared) -> str:
    """What decides here, whatever the mistake is; or nothing."""
    row, expected = wrong.row, wrong.expected
    generations = [one.request["generation"] for one in seen]
    op, key = row.request["op"], row.request.get("key", "")
    if expected == REFUSED and row.request["generation"] < max(generations):
        return f"generation {max(generations)} has begun: older ones are refused"
    if op == "join":
        return _fact_of_join(n, seen, wrong)
    if row.reply == REFUSED:
        return "this message is of the current generation, or begins a newer one"
    if expected is None:
        return "nothing has stored a value in this generation: the reply is None"
    if op == "set":
        return "None means not yet: a message that was carried out has another reply"
    if row.reply is None and op in ("get", "wait"):
        return "a key has a value once it was stored, even an empty text"
    if op == "compare_set":
        return f"the reply is what is stored under {key} afterwards, whoever stored it"
    if op in ("get", "add") and str(row.reply) == str(expected):
        return "values are texts, also sums once they are stored; add replies an int"
    if op == "add":
        return f"add changes the value of {key}; a key without one counts as 0"
    return "the value is the one that was stored last, in this generation"


def _fact_of_join(n: int, seen: list[Row], wrong: Compared) -> str:
    own = wrong.row.request["generation"]
    names = {
        one.request["key"]: None
        for one in seen
        if one.request["op"] == "join" and one.request["generation"] == own
    }
    listed = f"{', '.join(names)} joined generation {own}"
    if wrong.expected is None:
        return f"{listed}: not all {n} yet, so nobody has a rank"
    if wrong.expected == REFUSED:
        return f"all {n} ranks are taken: one more name is refused, not kept waiting"
    if wrong.row.reply is None:
        return f"{listed}: that is all {n}, so each of them has a rank"
    return f"n = {n}: each name has a rank from 0 to {n - 1} of its own, and keeps it"
