"""Why the transport ended a rank: whose part in which call did not fit, from journals.

gloo checks one thing only, that no more bytes arrive than a tensor holds, and answers
by ending the process. What it does not say (who sent them, in which call) the ranks
have written down before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from distlab.comm import ANY, COLLECTIVES, Event
from distlab.runner.record import RankRecord, Run

_SENDING = ("send", "isend", "sendrecv")
_RECEIVING = ("recv", "irecv", "sendrecv")


def misfit_of(run: Run, record: RankRecord) -> str:
    """The call that `record` had not ended and the part of another that does not fit.

    Such as "rank 0 called all_reduce on [4] float32, rank 1 called all_reduce on [8]
    float32"; or nothing, if all that is known fits.
    """
    for call in record.open_calls():
        for other, theirs in _counterparts(run, record, call):
            if _facts(theirs, "") != _facts(call, _side(call)):
                return (
                    f"rank {record.rank} called {_text(call, _side(call))}, "
                    f"rank {other} called {_text(theirs, '')}"
                )
    return ""


def _counterparts(
    run: Run, record: RankRecord, call: Event
) -> Iterator[tuple[int, Event]]:
    """The other ranks' calls that belong to this one: the k-th to the k-th."""
    if call["op"] in COLLECTIVES:
        index = _index(_collectives(record, call), call)
        for other in run.ranks:
            theirs = _collectives(other, call)
            if other is not record and index < len(theirs):
                yield other.rank, theirs[index]
        return
    if call["op"] not in _RECEIVING or call["src"] == ANY:
        return
    src = call["src"]
    mine = _ends(record, _RECEIVING, "src", src, call)
    theirs = _ends(run.ranks[src], _SENDING, "dst", record.rank, call)
    index = _index(mine, call)
    if index < len(theirs):
        yield src, theirs[index]


def _ends(
    record: RankRecord, ops: tuple[str, ...], side: str, peer: int, like: Event
) -> list[Event]:
    """The ends of messages with `peer` in the group and with the tag of `like`."""
    wanted = (peer, like["tag"], like["group"])
    return [
        call
        for call in record.calls()
        if call["op"] in ops and (call[side], call["tag"], call["group"]) == wanted
    ]


def _collectives(record: RankRecord, like: Event) -> list[Event]:
    calls = record.calls()
    return [c for c in calls if c["op"] in COLLECTIVES and c["group"] == like["group"]]


def _index(calls: list[Event], call: Event) -> int:
    return next(i for i, c in enumerate(calls) if c["n"] == call["n"])


def _side(call: Event) -> str:
    """Which tensor of a call has to fit: in a message, what is received into."""
    return "" if call["op"] in COLLECTIVES else "into_"


def _facts(call: Event, side: str) -> tuple[object, ...]:
    act = (call["op"], call["root"]) if call["op"] in COLLECTIVES else ()
    return (*act, math.prod(call[f"{side}shape"] or []), call[f"{side}dtype"])


def _text(call: Event, side: str) -> str:
    root = "" if call["root"] is None else f" with rank {call['root']}"
    if call[f"{side}shape"] is None:
        return f"{call['op']}{root}"
    what = "into" if side else "on" if call["op"] in COLLECTIVES else "of"
    return f"{call['op']}{root} {what} {call[f'{side}shape']} {call[f'{side}dtype']}"
