"""A trace as the page reads it: names as they are, columns of numbers zipped.

A column is written as the differences between neighbors, lowest bytes first: the two
million messages of a ring of 1,024 ranks come to less than half a megabyte like that.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from distlab.trace.critical_path import Segment
from distlab.trace.links import PARTS, shares, ways
from distlab.trace.model import NONE, Table, Trace
from distlab.trace.story import missing

if TYPE_CHECKING:
    from distlab.runner import Run

OVERVIEW = 97  # ranks from which the page shows a heat map first, as in page.js
MAX_BYTES = 6_000_000  # of packed messages, which a browser still opens at once
_SAMPLE = 100_000  # messages, from which the size of all is judged
_ROWS, _GROUPS = 1024, 128  # at most, of the heat map and of the matrix
_ENDS = {
    "finished": "finished",
    "raised": "raised an error",
    "died": "died",
    "waiting": "",
    "running": "busy",
}
_KINDS = ("message", "queue", "call", "work")
_SHORT = {"start_ps": "start", "ready_ps": "ready", "end_ps": "end"}
_CALLS = (
    *("rank", "number", "label", "site", "state", "tag", "num_bytes"),
    *("start_ps", "ready_ps", "end_ps", "last", "step", "step_end"),
)
_MESSAGES = (
    *("src", "dst", "num_bytes", "tag", "start_ps", "end_ps"),
    *("sent", "received", "step", "lost"),
)


def pack(
    trace: Trace, run: Run, path: Sequence[Segment], title: str = ""
) -> dict[str, Any]:
    """`trace` as what JSON can hold; of too many messages the first ones."""
    kept = _fitting(trace.messages)
    notes = list(trace.notes)
    if kept < len(trace.messages):
        notes.append(
            f"of {len(trace.messages):,} messages the first {kept:,} can be seen one "
            "by one; the heat map, the matrix and the links in use count all of them"
        )
    return {
        "title": title,
        "sentence": trace.sentence,
        "ranks": trace.world_size,
        "end": trace.end_ps,
        "steps": trace.num_steps,
        "cycle": list(trace.cycle),
        "never": _never(trace, run),
        "ended": _ended(run),
        "stuck": [[rank, start] for rank, (start, _) in trace.stuck.items()],
        "labels": list(trace.labels),
        "sites": [[site.file, site.line, site.text] for site in trace.sites],
        "calls": _table(trace.calls, _CALLS),
        "messages": _table(trace.messages.only(slice(0, kept)), _MESSAGES),
        "path": _path(path),
        **_shares(trace),
        "notes": notes,
    }


def column(values: NDArray[Any]) -> tuple[int, str]:
    """Bytes per number (4 or 8), and the column as text."""
    numbers = values.astype(np.int64)
    steps = np.diff(numbers, prepend=0)
    limit = 1 << 31
    small = all(
        not len(part) or (part.min() >= -limit and part.max() < limit)
        for part in (numbers, steps)
    )
    width = 4 if small else 8
    planes = steps.astype(f"<i{width}").view(np.uint8).reshape(-1, width).T
    return width, zipped(planes.tobytes())


def zipped(raw: bytes) -> str:
    """Zipped, as text."""
    return base64.b64encode(zlib.compress(raw, 6)).decode("ascii")


def _table(rows: Table, names: tuple[str, ...]) -> dict[str, Any]:
    columns = {_SHORT.get(name, name): column(rows[name]) for name in names}
    return {"length": len(rows), "columns": columns}


def _fitting(messages: Table) -> int:
    """How many messages fit into the page, judged from a sample of them."""
    count = len(messages)
    if count <= _SAMPLE:
        return count
    sample = messages.only(slice(0, _SAMPLE))
    size = sum(len(column(sample[name])[1]) for name in _MESSAGES)
    return min(count, int(_SAMPLE * MAX_BYTES / size))


def _path(path: Sequence[Segment]) -> dict[str, Any]:
    rows = [
        (s.rank, s.start_ps, s.end_ps, _KINDS.index(s.kind), s.call, s.message)
        for s in path
    ]
    names = ("rank", "start", "end", "kind", "call", "message")
    matrix = np.array(rows, dtype=np.int64).reshape(-1, len(names))
    columns = {name: column(matrix[:, i]) for i, name in enumerate(names)}
    return {"length": len(rows), "columns": columns}


def _never(trace: Trace, run: Run) -> list[list[Any]]:
    """For each message that never came: its ends, and since when it is waited for."""
    found = []
    for wait in missing(run):
        both = (wait.waiter, wait.peer)
        begun = [trace.stuck[rank] for rank in both if rank in trace.stuck]
        start, step = max(begun, default=(0, 0))
        found.append([*wait.ends, start, step, wait.in_cycle, wait.given])
    return found


def _ended(run: Run) -> list[str]:
    """What became of each rank that does not wait, where that is worth a word."""
    if run.outcome == "finished":
        return [""] * run.world_size
    return [
        _ENDS[record.status] if record.calls() else f"{_ENDS[record.status]}, no call"
        for record in run.ranks
    ]


# ── counted over everything ─────────────────────────────────────────────────────────


def _shares(trace: Trace) -> dict[str, Any]:
    m, (out, into) = trace.messages, ways(trace)
    strip = {
        "mean": _eighth((out.mean(axis=0) + into.mean(axis=0)) / 2),
        "most": _eighth(np.maximum(out, into).max(axis=0)),
    }
    if trace.world_size < OVERVIEW:
        return {"strip": strip}
    moving, waiting = _moving(trace, np.maximum(out, into))
    per_row = -(-trace.world_size // _ROWS)
    since = np.array([(r, start) for r, (start, _) in trace.stuck.items()], np.int64)
    ranks, starts = since.reshape(-1, 2).T
    stuck = shares(trace, ranks, starts, np.full(len(ranks), trace.end_ps))
    heat = [_rows(part, per_row) for part in (moving, waiting, stuck)]
    group = -(-trace.world_size // _GROUPS)
    groups = -(-trace.world_size // group)
    cells = (m["src"] // group) * groups + m["dst"] // group
    matrix = np.bincount(cells, m["num_bytes"], groups * groups)
    overview = {
        "rows": len(heat[0]),
        "parts": PARTS,
        "moving": _eighth(heat[0]),
        "waiting": _eighth(heat[1]),
        "stuck": _eighth(heat[2]),
        "groups": groups,
        "group": group,
        "matrix": column(matrix),
    }
    return {"strip": strip, "overview": overview}


def _moving(trace: Trace, moving: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """How much of each part of time every rank moves data, and how much it waits."""
    calls = trace.calls
    if not len(calls):
        return moving, np.zeros_like(moving)
    waiting = shares(trace, calls["rank"], calls["start_ps"], calls["ready_ps"])
    joint = calls.only((calls["last"] != NONE) | (calls["state"] == 0))
    inside = shares(trace, joint["rank"], joint["ready_ps"], joint["end_ps"])
    return np.maximum(moving, inside), waiting


def _rows(part: NDArray[Any], per_row: int) -> NDArray[Any]:
    """The mean over each `per_row` ranks."""
    edges = np.arange(0, len(part), per_row)
    counts = np.diff(np.append(edges, len(part)))
    return np.add.reduceat(part, edges, axis=0) / counts[:, None]  # type: ignore[no-any-return,unused-ignore]


def _eighth(values: NDArray[Any]) -> str:
    """Shares from 0 to 1 as bytes, zipped."""
    return zipped(np.round(values * 255).astype(np.uint8).tobytes())
