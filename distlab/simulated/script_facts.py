"""Figures of a script's simulated run: what its communication cost, and who waited.

All of it is read from the ranks' journals. The k-th collectives of a group's members
belong together: data moves from when the last of them has called (`last`) until the
first has seen its end. A rank is exposed to communication while it waits for it,

    compute ──▶ post ─── goes on computing ──▶ wait ▓▓▓▓ exposed ▓▓▓▓ end
                     last ─────────── under way ──────────────────── end

and what it computes between `post` and `wait` is hidden behind it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from distlab.comm import Event
from distlab.runner.autopsy import place
from distlab.sim import SimRun
from distlab.trace.critical_path import path_of, seconds_by_kind
from distlab.trace.journals import trace_of
from distlab.trace.model import NONE, Trace

MAX_EVENTS = 400_000
"""Of all journals; a longer run has no critical path and no page."""
_MESSAGES = ("send", "recv")
_PLACES = 5  # lines of the critical path that are told

Facts = dict[str, Any]


@dataclass
class _Done:
    """One call of one rank, in seconds of virtual time."""

    call: Event
    rank: int
    posted_s: float
    exposed_s: float = 0.0
    end_s: float | None = None


def facts_of(done: SimRun, per_node: int) -> Facts:
    """All figures of a run, as plain data; times in seconds, sizes in bytes."""
    calls = [call for record in done.ranks for call in _calls(record.rank, record)]
    exposed = [0.0] * done.world_size
    for call in calls:
        exposed[call.rank] += call.exposed_s
    worst = max(range(done.world_size), key=exposed.__getitem__)
    return {
        "world_size": done.world_size,
        "nodes": done.world_size // per_node,
        "ranks_per_node": per_node,
        "outcome": done.outcome,
        "time_s": done.time_s,
        "exposed_s": sum(exposed) / done.world_size,
        "exposed_most_s": exposed[worst],
        "exposed_most_rank": worst,
        **_memory(done),
        "collectives": list(_by_kind(calls, done.world_size)),
        "trace_hash": done.trace_hash,
        **_critical(done),
    }


def _memory(done: SimRun) -> Facts:
    """Of a run with fake tensors: what the rank that needs most needs at its peak."""
    if not any(done.memory):
        return {"memory": None, "played": [], "unlike": []}
    sizes = [sum(kinds.values()) for kinds in done.memory]
    worst = max(range(done.world_size), key=sizes.__getitem__)
    kinds = dict(done.memory[worst])
    return {
        "memory": {"rank": worst, "bytes": sizes[worst], "kinds": kinds},
        "played": list(done.played),
        "unlike": [list(pair) for pair in done.unlike],
    }


def is_long(done: SimRun) -> bool:
    """Whether there are too many calls to draw them."""
    return sum(len(record.journal) for record in done.ranks) > MAX_EVENTS


def _calls(rank: int, record: Any) -> Iterator[_Done]:
    """The calls of a rank, with how long it waited for each."""
    calls: dict[int, _Done] = {}
    waits: dict[int, float] = {}
    for event in record.journal:
        number = event["n"]
        if event["k"] in ("enter", "post"):
            calls[number] = _Done(event, rank, event["t"])
            if event["k"] == "enter":
                waits[number] = event["t"]
        elif event["k"] == "wait":
            waits[number] = event["t"]
        elif number in waits and number in calls:
            calls[number].exposed_s += event["t"] - waits.pop(number)
            calls[number].end_s = event["t"]
    yield from calls.values()


_Layout = tuple[int, int]
"""A group's size, and the distance between its ranks; 0 if they differ."""


def _by_kind(calls: Iterable[_Done], world_size: int) -> Iterator[Facts]:
    """A row for each operation of groups of a kind, the most exposed one first.

    A mesh makes many groups of a kind, such as the 128 that shard over 2 neighbors: of
    those a row has the mean.
    """
    kinds: dict[tuple[str, _Layout], dict[str, list[_Done]]] = defaultdict(dict)
    for call in calls:
        op, group = call.call["op"], call.call["group"]
        if op != "new_group":
            layout = _layout(call.call["members"])
            kinds[op, layout].setdefault(group, []).append(call)
    rows = [_row(op, layout, groups) for (op, layout), groups in kinds.items()]
    yield from sorted(rows, key=lambda row: -row["exposed_s"])


def _layout(members: list[int]) -> _Layout:
    steps = {b - a for a, b in pairwise(members[:3])}
    return len(members), steps.pop() if len(steps) == 1 else 0


def _row(op: str, layout: _Layout, groups: dict[str, list[_Done]]) -> Facts:
    calls = [call for members in groups.values() for call in members]
    by_rank = Counter(call.rank for call in calls)
    met = [meeting for members in groups.values() for meeting in _meetings(members)]
    n, collective = len(by_rank), op not in _MESSAGES
    return {
        "op": op,
        "ranks": n,
        "group_size": layout[0],
        "group_stride": layout[1],
        "calls": max(by_rank.values()),
        "bytes": sum(call.call.get("bytes") or 0 for call in calls) // n,
        "under_way_s": layout[0] * sum(map(_under_way_s, met)) / n
        if collective
        else None,
        "exposed_s": sum(call.exposed_s for call in calls) / n,
        "late_s": sum(map(_late_s, met)) / n if collective else None,
    }


def _meetings(calls: list[_Done]) -> list[list[_Done]]:
    """The calls of a group's members that belong together."""
    by_rank: dict[int, list[_Done]] = defaultdict(list)
    for call in calls:
        by_rank[call.rank].append(call)
    return [
        [mine[k] for mine in by_rank.values() if k < len(mine)]
        for k in range(max(map(len, by_rank.values())))
    ]


def _under_way_s(meeting: list[_Done]) -> float:
    """From when all had called until the first saw its end."""
    ends = [call.end_s for call in meeting if call.end_s is not None]
    if not ends:
        return 0.0
    return max(0.0, min(ends) - max(call.posted_s for call in meeting))


def _late_s(meeting: list[_Done]) -> float:
    """How long its members waited, in all, for those that called later."""
    last_s = max(call.posted_s for call in meeting)
    return sum(
        max(0.0, min(call.exposed_s, last_s - (call.end_s - call.exposed_s)))
        for call in meeting
        if call.end_s is not None
    )


def _critical(done: SimRun) -> Facts:
    """How long the critical path is in each kind of segment, and on which lines."""
    if done.outcome != "finished" or is_long(done):
        return {"critical_path": None, "critical_lines": []}
    trace = trace_of(done)
    path = path_of(trace)
    lines: dict[tuple[str, str], float] = defaultdict(float)
    for part in path:
        if part.call != NONE:
            lines[_line(trace, part.call)] += (part.end_ps - part.start_ps) / 1e12
    longest = sorted(lines.items(), key=lambda item: -item[1])[:_PLACES]
    return {
        "critical_path": seconds_by_kind(path),
        "critical_lines": [
            {"op": op, "at": at, "seconds": seconds} for (op, at), seconds in longest
        ],
    }


def _line(trace: Trace, row: int) -> tuple[str, str]:
    call = trace.calls.row(row)
    site = trace.sites[call["site"]]
    label = trace.labels[call["label"]].removeprefix("wait: ")
    return label, place((site.file, site.line))
