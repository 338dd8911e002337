"""Calls of different ranks that do not fit together, as their journals tell.

Some such runs hang, some fail, and some end as if nothing had been wrong: the transport
delivers rubbish, or what nobody waited for has come in time by luck.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from distlab.comm import COLLECTIVES, Event
from distlab.grading.verdict import NotYetError
from distlab.runner import RankRecord, Run
from distlab.runner.autopsy import (
    SENDS,
    Evidence,
    describe,
    describe_tensor,
    evidence,
    explain,
    in_words,
    place_of,
)
from distlab.runner.pairs import pairs

RULES = {
    "ring-of-sends": (
        "one side of every pair must receive: sendrecv, or isend before recv"
    ),
    "ring-of-recvs": (
        "one side of every blocking pair must send: use sendrecv, or irecv before send"
    ),
    "sendrecv-with-one-peer": (
        "send to the right and receive from the left: (rank + i) % n and (rank - i) % n"
    ),
    "unmatched-send": "every rank runs the same line: branch on comm.rank",
    "unmatched-recv": "every recv needs a send on the other side: branch on comm.rank",
    "peer-finished": "each send needs its recv on the rank it names, and vice versa",
    "send-to-self": "a rank does not send to itself: leave your own rank out",
    "no-such-rank": "ranks are 0 … n - 1",
    "collective-not-here": "send and recv only: this unit builds the rest",
    "mismatched-buffers": "both sides of a message need the same shape and dtype",
    "never-waited": "keep what isend, irecv and async_op return, and call its wait()",
    "collective-mismatch": "every rank calls the same collectives in the same order",
    "spinning": "look for a loop whose end never comes",
    "out-of-memory": "look at the size of the tensor you make on that line",
    "rank-died": "a rank must return from its function, not end its process",
}


RULE_RING = "ranks are 0 … n - 1; the one after the last is 0: use % n"
RULE_PART = "does the receiver expect the part that is sent? is its buffer long enough?"
RULE_ALIKE = "in a collective all ranks' tensors have the same shape and dtype"

Calls = Sequence[tuple[int, Event]]
"""Calls and the ranks that made them."""


def not_yet(
    run: Run, slug: str, message: str = "", *, kind: str = "NOT YET", calls: Calls = ()
) -> NotYetError:
    """The verdict on a run after which no other clause can be judged.

    `calls` are those that the message speaks of: the evidence has their lines too.
    """
    return NotYetError(
        message or explain(run),
        slug=slug,
        rule=RULES.get(slug, ""),
        evidence=_with_calls(evidence(run), calls),
        kind=kind,
        fatal=True,
        output=printed(run),
        run=run,
    )


def _with_calls(lines: Sequence[Evidence], calls: Calls) -> tuple[Evidence, ...]:
    """Each rank's line, and before it the call in question where it has gone on."""
    shown: list[Evidence] = []
    for line in lines:
        for rank, call in calls:
            where = place_of(call)
            if rank == line.rank and where != line.where:
                text = f"call #{call['n']} {describe(call)}  {describe_tensor(call)}"
                shown.append(
                    Evidence(rank=rank, state="called", text=text, where=where)
                )
        if line.where or not shown or shown[-1].rank != line.rank:
            shown.append(line)
    return tuple(shown)


def printed(run: Run) -> str:
    """What the ranks printed, each line with its rank."""
    return "\n".join(
        f"[rank {record.rank}] {line}"
        for record in run.ranks
        for line in record.output.splitlines()
    )


def _made(record: RankRecord) -> list[Event]:
    """The calls of a rank without those that were refused: these met nobody."""
    refused = {e["n"] for e in record.journal if e["k"] == "error" and e["refused"]}
    return [call for call in record.calls() if call["n"] not in refused]


def mismatched_ends(run: Run) -> NotYetError | None:
    """A message whose two ends are tensors of different size or dtype."""
    for src, dst, _tag, sent, received in pairs(run.ranks):
        sent_facts = (math.prod(sent["shape"] or []), sent["dtype"])
        received_facts = (
            math.prod(received["into_shape"] or []),
            received["into_dtype"],
        )
        if sent_facts != received_facts:
            takes = {"shape": received["into_shape"], "dtype": received["into_dtype"]}
            message = (
                f"rank {src} sends {describe_tensor(sent)}, but rank {dst} "
                f"receives into {describe_tensor(takes)}"
            )
            calls = [(src, sent), (dst, {**received, **takes})]
            wrong = not_yet(run, "mismatched-buffers", message, calls=calls)
            same_dtype = sent_facts[1] == received_facts[1]
            return wrong.but(rule=RULE_PART) if same_dtype else wrong
    return None


def unlike_collectives(run: Run) -> NotYetError | None:
    """The first collective in which two ranks do not take part alike.

    The k-th calls of a group's members belong together, whatever they are.
    """
    groups: dict[str, dict[int, list[Event]]] = defaultdict(dict)
    for record in run.ranks:
        for call in _made(record):
            if call["op"] in COLLECTIVES:
                groups[call["group"]].setdefault(record.rank, []).append(call)
    for members in groups.values():
        for index in range(max(map(len, members.values()))):
            calls = [(r, own[index]) for r, own in members.items() if index < len(own)]
            (first, one), *rest = calls
            for rank, other in rest:
                if _act(one) != _act(other):
                    shown = describe_tensor(one) != describe_tensor(other)
                    message = (
                        f"in collective #{index + 1}, rank {first} calls "
                        f"{_act_text(one, shown)}, but rank {rank} calls "
                        f"{_act_text(other, shown)}"
                    )
                    calls = [(first, one), (rank, other)]
                    wrong = not_yet(run, "collective-mismatch", message, calls=calls)
                    alike = _act(one)[:2] == _act(other)[:2]
                    return wrong.but(rule=RULE_ALIKE) if alike else wrong
    return None


def _act(call: Event) -> tuple[Any, ...]:
    return call["op"], call["root"], math.prod(call["shape"] or []), call["dtype"]


def _act_text(call: Event, with_tensor: bool) -> str:
    root = "" if call["root"] is None else f" with root {call['root']}"
    of = describe_tensor(call) if with_tensor else ""
    return f"{call['op']}{root}" + (f" on {of}" if of else "")


def unlike_counts(run: Run) -> NotYetError | None:
    """A rank whose calls and whose count of messages cannot both be right."""
    for record in run.ranks:
        failed = {e["n"] for e in record.journal if e["k"] == "error"}
        sends = [c for c in record.calls() if c["op"] in SENDS and c["n"] not in failed]
        if bool(record.messages) > bool(record.calls()) or (
            sends and not record.messages
        ):
            message = (
                f"rank {record.rank} sent {record.messages} messages by one count and "
                f"{len(sends)} by another: comm was changed"
            )
            return not_yet(run, "", message)
    return None


def never_waited(run: Run) -> NotYetError | None:
    """A transfer that was started and whose end nobody waited for."""
    lines = [
        Evidence(
            rank=record.rank,
            state="under way",
            text=f"call #{call['n']} {describe(call)}",
            where=place_of(call),
        )
        for record in run.ranks
        for call in record.open_calls()
    ]
    if not lines:
        return None
    first = next(record for record in run.ranks if record.open_calls())
    call = first.open_calls()[0]
    article = "an" if call["op"][0] in "aeiou" else "a"
    return NotYetError(
        f"rank {first.rank} started {article} {in_words(call)} in call #{call['n']} "
        "and never waited for it",
        slug="never-waited",
        evidence=tuple({line.rank: line for line in reversed(lines)}.values())[::-1],
        rule=RULES["never-waited"],
        fatal=True,
        output=printed(run),
        run=run,
    )
