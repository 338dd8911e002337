"""The critical path: the chain of calls and messages that made the run take so long.

To shorten anything that is not on it changes nothing. It is found from its end: what
ended last could not end sooner because of one message, or of the rank's own work; that
one could not begin sooner because the later of its two sides had not come yet; and so
on back to the start. Each link is the *last* of the things that were waited for, so the
chain has no gap, and none that is longer exists.

Cost: as many steps as the path has, whatever the size of the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from distlab.trace.model import NONE, Column, Trace

if TYPE_CHECKING:
    from distlab.runner import Run

Kind = Literal["message", "queue", "call", "work"]
"""message: data moves · queue: it waits for another message to leave the same way ·
call: a call without a message · work: between two calls, the rank's own."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A stretch of the path. `call`, `message`: rows of the trace's tables, or -1."""

    kind: Kind
    rank: int
    start_ps: int
    end_ps: int
    call: int = NONE
    message: int = NONE


def critical_path(run: Run) -> tuple[Segment, ...]:
    """The segments from the start of `run` to its end; none if it did not finish."""
    from distlab.trace.journals import trace_of

    return path_of(trace_of(run))


def path_of(trace: Trace) -> tuple[Segment, ...]:
    """The same, of a trace. Each segment starts when the one before it ends."""
    if trace.outcome != "finished":
        return ()
    walk = _Walk(trace)
    if len(trace.calls):
        walk.from_call(int(np.argmax(trace.calls["end_ps"])))
    elif len(trace.messages):
        walk.from_message(int(np.argmax(trace.messages["end_ps"])))
    return tuple(reversed(walk.segments))


def seconds_by_kind(path: Iterable[Segment]) -> dict[Kind, float]:
    """How long the path is in each kind of segment."""
    total: dict[Kind, float] = {}
    for part in path:
        took_s = (part.end_ps - part.start_ps) / 1e12
        total[part.kind] = total.get(part.kind, 0.0) + took_s
    return total


class _Index:
    """Rows by the value of a column, each list in the order of another column."""

    def __init__(self, keys: Column, order: Column, which: Any = None) -> None:
        rows = np.arange(len(keys)) if which is None else np.flatnonzero(which)
        self._rows = rows[np.lexsort((order[rows], keys[rows]))]
        self._keys, self._order = keys[self._rows], order[self._rows]

    def latest(self, key: int, until: int) -> int:
        """The last row of `key` whose order is at most `until`, or -1."""
        low, high = np.searchsorted(self._keys, [key, key + 1])
        at = int(np.searchsorted(self._order[low:high], until, side="right"))
        return int(self._rows[low + at - 1]) if at else NONE


class _Walk:
    """One walk from the end to the start; `segments` are in that order."""

    def __init__(self, trace: Trace) -> None:
        self._calls, self._messages = trace.calls, trace.messages
        self.segments: list[Segment] = []
        m = trace.messages
        self._sharing = {n: _Index(m[n], m["start_ps"]) for n in ("src", "dst")}

    def _add(
        self, kind: Kind, rank: int, start: int, end: int, message: int = NONE,
        call: int = NONE,
    ) -> None:  # fmt: skip
        if end > start:
            self.segments.append(
                Segment(
                    kind=kind,
                    rank=rank,
                    start_ps=start,
                    end_ps=end,
                    call=call,
                    message=message,
                )
            )

    def _late(self, found: Iterable[int], after: int) -> int:
        """The message among `found` that ended last, if it ended after `after`."""
        ends = self._messages["end_ps"]
        late = [m for m in found if m != NONE and int(ends[m]) > after]
        return max(late, key=lambda m: int(ends[m]), default=NONE)

    def _ahead(self, message: int) -> int:
        """The message that left last before this one, on the same link."""
        m = self._messages.row(message)
        found = [
            index.latest(m[name], m["start_ps"] - 1)
            for name, index in self._sharing.items()
        ]
        starts = self._messages["start_ps"]
        return max(found, key=lambda i: int(starts[i]) if i != NONE else NONE)

    def _moved(self, message: int) -> dict[str, int]:
        m = self._messages.row(message)
        self._add("message", m["src"], m["start_ps"], m["end_ps"], message)
        return m

    # ── with the calls of every rank ────────────────────────────────────────────────

    def from_call(self, row: int) -> None:
        """Walk back from the end of a call."""
        calls, m = self._calls, self._messages
        self._of_call = [
            _Index(m[name], m["end_ps"]) for name in ("sent_end", "received_end")
        ]
        while row != NONE:
            row = self._cause_of(row)
            rank, start = int(calls["rank"][row]), int(calls["start_ps"][row])
            if row == 0 or int(calls["rank"][row - 1]) != rank:
                self._add("work", rank, 0, start)
                return
            row -= 1
            self._add("work", rank, int(calls["end_ps"][row]), start)

    def _cause_of(self, row: int) -> int:
        """The call that began last of those that call `row` had to wait for."""
        call = self._calls.row(row)
        rank, start, end = call["rank"], call["start_ps"], call["end_ps"]
        late = self._late((i.latest(row, end) for i in self._of_call), start)
        if late != NONE:
            self._add("call", rank, int(self._messages["end_ps"][late]), end, call=row)
            return self._later_side(self._moved(late), late)
        ready = call["ready_ps"]
        if call["last"] not in (NONE, row) and start < ready <= end:
            self._add("call", rank, ready, end, call=row)
            return call["last"]
        self._add("call", rank, start, end, call=row)
        return row

    def _later_side(self, m: dict[str, int], message: int) -> int:
        """The call that posted the later end of a message, or of those before it."""
        starts = self._calls["start_ps"]
        while True:
            start = m["start_ps"]
            # What was sent eagerly left before its receiver was there.
            both = (m["sent"], m["received"])
            there = [row for row in both if int(starts[row]) <= start]
            side = max(there, key=lambda row: int(starts[row]), default=m["sent"])
            posted = int(starts[side])
            ahead = self._ahead(message) if start > posted else NONE
            if ahead == NONE:
                rank = int(self._calls["rank"][side])
                self._add("queue", rank, posted, start, message)
                return side
            message, m = ahead, self._messages.row(ahead)
            self._add("queue", m["src"], m["start_ps"], start, message)

    # ── with nothing but messages ───────────────────────────────────────────────────

    def from_message(self, message: int) -> None:
        """Walk back from the end of a message, as far as messages tell."""
        rows = self._messages
        took = rows["end_ps"] > rows["start_ps"]  # else it delayed nothing
        of_rank = [_Index(rows[n], rows["end_ps"], took) for n in ("src", "dst")]
        m = self._moved(message)
        while True:
            start = m["start_ps"]
            found = [
                index.latest(m[side], start)
                for index in of_rank
                for side in ("src", "dst")
            ]
            before, ahead = self._late(found, NONE), self._ahead(message)
            ended = int(self._messages["end_ps"][before]) if before != NONE else 0
            held = ahead != NONE and int(self._messages["end_ps"][ahead]) > start
            if ended < start and held:
                message, m = ahead, self._messages.row(ahead)
                self._add("queue", m["src"], m["start_ps"], start, message)
                continue
            self._add("work", m["src"], ended, start)
            if before == NONE:
                return
            message, m = before, self._moved(before)
