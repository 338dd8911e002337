"""Which send met which receive: read from the journals, channel by channel in order.

A channel is a group, a sender, a receiver and a tag. What is sent in it arrives in the
order in which it was sent, so the k-th send belongs to the k-th receive.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from distlab.comm import Event
    from distlab.runner.record import RankRecord

_GIVES = ("send", "isend", "sendrecv")
_TAKES = ("recv", "irecv", "sendrecv")


class Pair(NamedTuple):
    """The two calls of one message; `sent` and `received` are their journal events."""

    src: int
    dst: int
    tag: int
    sent: Event
    received: Event


def pairs(ranks: Iterable[RankRecord]) -> list[Pair]:
    """Every send that met its receive; a refused call met nobody."""
    sends: dict[Any, list[Event]] = defaultdict(list)
    receives: dict[Any, list[Event]] = defaultdict(list)
    for record in ranks:
        ends = {e["n"]: e for e in record.journal if e["k"] in ("exit", "error")}
        for call in record.calls():
            end = ends.get(call["n"], {})
            if end.get("refused"):
                continue
            group, rank, tag = call["group"], record.rank, call["tag"]
            if call["op"] in _GIVES:
                sends[group, rank, call["dst"], tag].append(call)
            if call["op"] in _TAKES:
                # After a receive from anyone its end says from whom it came.
                src = end.get("src", call["src"])
                receives[group, src, rank, tag].append(call)
    return [
        Pair(src, dst, tag, sent, received)
        for (group, src, dst, tag), queue in sends.items()
        for sent, received in zip(queue, receives[group, src, dst, tag], strict=False)
    ]
