"""From a run's journals, and a simulation's messages, to the tables of a Trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from distlab.runner.autopsy import describe, explain
from distlab.runner.pairs import Pair, pairs
from distlab.trace.facts import Names, bytes_of, columns, rank_number, site_of
from distlab.trace.layout import MAX_EVENTS, POST, schedule
from distlab.trace.model import (
    CALL_COLUMNS,
    MESSAGE_COLUMNS,
    NONE,
    STATES,
    Table,
    Trace,
    table,
)

if TYPE_CHECKING:
    from distlab.comm import Event
    from distlab.runner import RankRecord, Run

PS = 1_000_000_000_000
MAX_CALLS = 400_000  # of all ranks that are read; of more, only the messages
_ALONE = "new_group"  # made by every rank, waits for none
_POINT_TO_POINT = ("send", "recv", "isend", "irecv", "sendrecv")
_AFTER = 0.2  # share of the run that is drawn after its last event, if ranks wait


def trace_of(run: Run) -> Trace:
    """The tables of `run`, real or simulated."""
    return _Reader(run).trace()


class _Reader:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._simulated = hasattr(run, "trace")
        self._ops, self._labels, self._sites = Names(), Names(), Names()
        self._rows: list[dict[str, int]] = []
        self._begun: dict[tuple[int, int], int] = {}  # (rank, number): its row
        self._over: dict[tuple[int, int], int] = {}  # the row in which it ended
        self._notes: list[str] = []
        journals = [record.journal for record in run.ranks]
        self._whole = sum(map(len, journals)) <= 3 * MAX_CALLS
        if not self._whole:
            self._notes.append("too many calls to show them: messages only")
        times = [e["t"] for j in journals for e in j if "t" in e] if self._whole else []
        self._zero_s = 0.0 if self._simulated else min(times, default=0.0)

    def trace(self) -> Trace:
        records = self._run.ranks if self._whole else ()
        for record in records:
            self._read(record)
        met = pairs(records)
        messages = self._simulated_messages(met) if self._simulated else None
        if messages is None:
            messages = table(MESSAGE_COLUMNS, [self._message(pair) for pair in met])
        self._mark_lost(messages)
        self._meet(records)
        self._mark_ready(messages)
        end_ps = self._end(messages)
        num_steps = self._number_steps(messages)
        rows = [tuple(row[name] for name in CALL_COLUMNS) for row in self._rows]
        order = np.argsort(messages["start_ps"], kind="stable")
        return Trace(
            world_size=self._run.world_size,
            clock="virtual" if self._simulated else "wall",
            outcome=self._run.outcome,
            end_ps=end_ps,
            calls=table(CALL_COLUMNS, rows),
            messages=messages.only(order),
            ops=tuple(self._ops.numbers),
            labels=tuple(self._labels.numbers),
            sites=tuple(site_of(file, line) for file, line in self._sites.numbers),
            num_steps=num_steps,
            sentence=self._run.explanation or explain(self._run),
            cycle=tuple(self._run.cycle),
            waits_for=self._run.waits_for,
            stuck=self._stuck(messages),
            links=getattr(self._run, "links", {}),
            notes=tuple(self._notes),
        )

    # ── calls ───────────────────────────────────────────────────────────────────────

    def _read(self, record: RankRecord) -> None:
        """One row for each call of a rank, and one for each wait."""
        calls: dict[int, Event] = {}
        open_rows: dict[int, int] = {}
        now = 0
        for event in record.journal:
            now = max(now, self._ps(event, now))
            number = event["n"]
            if event["k"] in ("enter", "post"):
                calls[number] = event
                row = self._add(record.rank, event, event, now)
                self._begun[record.rank, number] = row
                self._over[record.rank, number] = row
                if event["k"] == "enter":
                    open_rows[number] = row
                else:
                    self._rows[row]["state"] = STATES.index("posted")
            elif event["k"] == "wait" and number in calls:
                row = self._add(record.rank, calls[number], event, now)
                self._over[record.rank, number] = open_rows[number] = row
            elif number in open_rows:
                state = "failed" if event["k"] == "error" else "done"
                self._close(open_rows.pop(number), state, now)

    def _add(self, rank: int, call: Event, at: Event, now: int) -> int:
        wait = at["k"] == "wait"
        self._rows.append(
            {
                "rank": rank,
                "number": call["n"],
                "op": self._ops.of("wait" if wait else call["op"]),
                "dst": rank_number(call["dst"]),
                "src": rank_number(call["src"]),
                "tag": call["tag"],
                "num_bytes": bytes_of(call),
                "label": self._labels.of(("wait: " if wait else "") + describe(call)),
                "site": self._sites.of((at.get("file", ""), at.get("line", 0))),
                "state": STATES.index("waiting"),
                "start_ps": now,
                "ready_ps": now,
                "end_ps": now,
                "last": NONE,
                "step": NONE,
                "step_end": NONE,
            }
        )
        return len(self._rows) - 1

    def _close(self, row: int, state: str, now: int) -> None:
        self._rows[row]["state"] = STATES.index(state)
        self._rows[row]["end_ps"] = now

    def _ps(self, event: Event, now: int) -> int:
        return round((event["t"] - self._zero_s) * PS) if "t" in event else now

    # ── messages ────────────────────────────────────────────────────────────────────

    def _ends(self, pair: Pair) -> tuple[int, int, int, int]:
        sent, received = (pair.src, pair.sent["n"]), (pair.dst, pair.received["n"])
        begun, over = self._begun, self._over
        return begun[sent], begun[received], over[sent], over[received]

    def _starts(self, ends: tuple[int, ...]) -> int:
        """When both ends were there."""
        return max(self._rows[row]["start_ps"] for row in ends[:2])

    def _message(self, pair: Pair) -> tuple[int, ...]:
        """A message of real ranks: it moved once both ends were there."""
        ends = self._ends(pair)
        start = self._starts(ends)
        through = [
            self._rows[row]["end_ps"]
            for row in ends[2:]
            if STATES[self._rows[row]["state"]] == "done"
        ]
        # Who waits late sees it late: it was there when the first saw it.
        end = max(start, min(through, default=start))
        facts = (pair.src, pair.dst, bytes_of(pair.sent), start, end, pair.tag)
        return (*facts, *ends, NONE, 0)

    def _simulated_messages(self, met: list[Pair]) -> Table:
        """The simulation's own messages, each with the calls of its channel's pair."""
        trace: Any = getattr(self._run, "trace", ())
        channels: dict[tuple[int, int, int], list[tuple[int, ...]]] = defaultdict(list)
        for pair in met:
            if pair.src != pair.dst:  # one rank alone sends nothing
                channels[pair[:3]].append(self._ends(pair))
        for queue in channels.values():
            queue.sort(key=self._starts, reverse=True)
        alone = (NONE,) * 4
        ends = [
            found.pop() if (found := channels.get((m[0], m[1], m[5]))) else alone
            for m in (trace if channels else ())
        ]
        facts = columns(trace)
        links = np.array(ends or [alone] * len(trace), np.int64).reshape(-1, 4)
        rest = np.tile(np.array([NONE, 0], np.int64), (len(trace), 1))
        whole = np.column_stack([facts, links, rest])
        return Table(
            {name: whole[:, i].copy() for i, name in enumerate(MESSAGE_COLUMNS)}
        )

    def _mark_lost(self, messages: Table) -> None:
        """A loss names a channel and the number of the message in it."""
        for loss in getattr(self._run, "lost", ()):
            channel = zip(("src", "dst", "tag"), loss, strict=False)
            same = [messages[name] == value for name, value in channel]
            rows = np.flatnonzero(np.logical_and.reduce(same))
            if loss.number <= len(rows):
                messages["lost"][rows[loss.number - 1]] = 1

    # ── who waited for whom ─────────────────────────────────────────────────────────

    def _meet(self, records: Iterable[RankRecord]) -> None:
        """The k-th collectives of a group's members belong together."""
        meetings: dict[tuple[str, int], list[int]] = defaultdict(list)
        sizes: dict[tuple[str, int], int] = {}
        for record in records:
            counts: dict[str, int] = defaultdict(int)
            for call in record.calls():
                if call["op"] in _POINT_TO_POINT or call["op"] == _ALONE:
                    continue
                key = (call["group"], counts[call["group"]])
                counts[call["group"]] += 1
                meetings[key].append(self._begun[record.rank, call["n"]])
                sizes[key] = len(call["members"])
        for key, rows in meetings.items():
            if len(rows) == sizes[key] and len(rows) > 1:
                last = max(rows, key=lambda row: self._rows[row]["start_ps"])
                for row in rows:
                    self._until(self._rows[row], self._rows[last]["start_ps"], last)

    def _mark_ready(self, messages: Table) -> None:
        """A call waits until the first of its messages can move."""
        first: dict[int, tuple[int, int]] = {}
        columns = ("start_ps", "sent", "received", "sent_end", "received_end")
        linked = messages.only(messages["sent"] >= 0)
        for start, sent, received, *ends in zip(
            *(linked[name].tolist() for name in columns), strict=True
        ):
            later = max(sent, received, key=lambda row: self._rows[row]["start_ps"])
            for row in ends:
                first[row] = min(first.get(row, (start, later)), (start, later))
        for row, (start, later) in first.items():
            self._until(self._rows[row], start, later)

    def _until(self, row: dict[str, int], start: int, last: int) -> None:
        if STATES[row["state"]] == "done":
            row["ready_ps"] = min(max(start, row["start_ps"]), row["end_ps"])
            row["last"] = last

    # ── clocks ──────────────────────────────────────────────────────────────────────

    def _end(self, messages: Table) -> int:
        """The end of the picture; who waits forever waits until there."""
        seen = [row["end_ps"] for row in self._rows]
        end = max([*seen, int(messages["end_ps"].max(initial=0))])
        if self._simulated:
            end = max(end, round(self._run.seconds * PS))
        waiting = [r for r in self._rows if STATES[r["state"]] == "waiting"]
        if waiting or not end or any(r.status == "waiting" for r in self._run.ranks):
            end += max(round(end * _AFTER), PS // 1_000_000)
        for row in waiting:
            row["ready_ps"] = row["end_ps"] = end
        return end

    def _stuck(self, messages: Table) -> dict[int, tuple[int, int]]:
        """Since when each rank waits that waits forever."""
        since: dict[int, tuple[int, int]] = {}
        for record in self._run.ranks:
            if record.status == "waiting" and not self._rows:
                own = (messages["src"] == record.rank) | (
                    messages["dst"] == record.rank
                )
                since[record.rank] = int(messages["end_ps"][own].max(initial=0)), NONE
        for row in self._rows:
            if STATES[row["state"]] == "waiting":
                since[row["rank"]] = row["start_ps"], row["step"]
        return since

    def _number_steps(self, messages: Table) -> float:
        """Fill in logical time, unless the run is too long for it."""
        if sum(len(record.journal) for record in self._run.ranks) > MAX_EVENTS:
            return 0.0
        plan = schedule(self._run)
        if plan.left_out or not plan.bars:
            return 0.0
        for rows, bars in ((self._begun, plan.bars), (self._over, plan.waits)):
            for bar in bars:
                end = bar.start + POST if bar.state == "posted" else bar.end
                row = self._rows[rows[bar.rank, bar.call["n"]]]
                row["step"], row["step_end"] = round(100 * bar.start), round(100 * end)
        starts = {
            self._begun[a.src, a.call["n"]]: round(100 * a.start) for a in plan.arrows
        }
        steps = [starts.get(row, NONE) for row in messages["sent"].tolist()]
        messages["step"][:] = steps
        return plan.length
