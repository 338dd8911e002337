"""The finding as lines and as JSON: one sentence, and a table of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distlab.flight.hang import (
    Hang,
    current_call,
    have_met_apart,
    operation,
    spot,
)
from distlab.flight.records import Call, Records
from distlab.terminal import ranks_in_words

Line = tuple[str, str]
_FEW = 8  # ranks that have a row each
_TITLES = ("rank", "state", "group", "call", "operation", "shape", "dtype", "where")

_ADVICE = {
    "operation": "Every rank must make the same calls in the same order, so look for "
    "a branch on the rank, or for data that differs between ranks.",
    "dtype": "Convert the tensor to the same dtype on all ranks.",
    "size": "Use tensors of the same size on all ranks, or pad them. If these are "
    "different tensors, the ranks make their calls in different orders.",
    "root": "Pass the same src or dst on all ranks.",
    "reduce op": "Pass the same op on all ranks.",
    "absent": "Perhaps a rank left its loop early, raised an exception, or is still "
    "computing. The waiting ranks may also have made a call that the others never "
    "make.",
    "no-dump": "Read the logs of these ranks. They may have run out of memory, or been "
    "preempted.",
    "tag": "Pass the same tag to the send and its recv. If you pass none, it is 0.",
    "groups": "Every rank must make every group, in the same order, even if it isn't a "
    "member. Loop over all lists of ranks, and keep the group that contains this rank.",
    "sends": "A send may wait until the other rank receives. Let one of the ranks "
    "receive first, or use isend and wait for it at the end.",
    "recvs": "Each rank waits for a message that the other would send afterwards. Let "
    "one of the ranks send first, or use isend before recv.",
    "circle": "Make these calls in the same order on all ranks.",
    "apart": "The dumps don't say which ranks belong to these groups. If two ranks "
    "enter two groups in opposite orders, each waits for the other.",
    "agree": "The records show nothing wrong with the program. Check the network and "
    "the GPUs, and look for a slow rank.",
}
_CONCEPTS = {
    "operation": "order-of-calls",
    "dtype": "dtype-and-shape",
    "size": "dtype-and-shape",
    "root": "broadcast",
    "reduce op": "all-reduce",
    "absent": "unequal-shards",
    "no-dump": "rank-failure",
    "tag": "send-and-recv",
    "groups": "own-groups-only",
    "sends": "send-and-recv",
    "recvs": "send-and-recv",
    "circle": "order-of-calls",
    "apart": "process-group",
    "agree": "hang",
}
"""The concepts that `distlab explain` explains for each kind of hang."""
_GLOO = (
    "Gloo doesn't record send or recv, so a rank that doesn't seem to be in a call may "
    "be in one of these."
)
_ROOTS = (
    "The dumps don't record the root of a broadcast or a reduce, so compare src and "
    "dst yourself."
)


def page(records: Records, hang: Hang) -> list[Line]:
    """Return the finding for people, as (style, line) pairs."""
    style = "pass" if hang.kind == "finished" else "fail"
    lines = [(style, hang.sentence), ("plain", "")]
    lines += table(_columns([_TITLES, *_rows(records, hang)]))
    notes = notes_on(records, hang)
    return lines + [("plain", "")] * bool(notes) + [("dim", note) for note in notes]


def table(rows: Sequence[Sequence[str]]) -> list[Line]:
    """Return rows of cells as lines, with the first as titles."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for number, row in enumerate(rows):
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append(("dim" if not number else "plain", "  ".join(cells).rstrip()))
    return lines


def _columns(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Leave out the groups where there is only one."""
    place = _TITLES.index("group")
    if len({row[place] for row in rows[1:]} - {""}) > 1:
        return list(rows)
    return [row[:place] + row[place + 1 :] for row in rows]


def concept_of(records: Records, hang: Hang) -> str:
    """The name under which `distlab explain` explains such a hang."""
    return _CONCEPTS[_pattern(records, hang)]


def _pattern(records: Records, hang: Hang) -> str:
    """The key of the advice."""
    ops = {call.op for call in hang.calls.values()}
    if hang.kind == "circle" and ops in ({"send"}, {"recv"}):
        return f"{ops.pop()}s"
    if have_met_apart(records, hang):
        return "groups"
    return hang.differ or hang.kind


def notes_on(records: Records, hang: Hang) -> list[str]:
    """Return what to look at first, and what these dumps can't show."""
    notes = []
    if hang.kind != "finished":
        concept = concept_of(records, hang)
        advice = _ADVICE[_pattern(records, hang)]
        notes = [f"{advice} `distlab explain {concept}` tells you more."]
    backends = {dump.backend for dump in records.dumps.values()}
    is_gloo = "gloo" in backends and not records.is_live
    if is_gloo and hang.kind in ("absent", "finished"):
        notes.append(_GLOO)
    if hang.kind == "agree" and _has_root(hang) and not records.is_live:
        notes.append(_ROOTS)
    return notes


def _has_root(hang: Hang) -> bool:
    return any(call.op in ("broadcast", "reduce") for call in hang.calls.values())


def _all(records: Records) -> list[int]:
    return sorted({*records.dumps, *records.missing})


def _shown_call(records: Records, hang: Hang, rank: int) -> Call | None:
    call = hang.calls.get(rank)
    if rank not in records.dumps:
        return call
    return call if call and not call.done else current_call(records, rank)


def _state(records: Records, rank: int, call: Call | None) -> str:
    if rank in records.ended:
        return "has ended"
    if rank not in records.dumps:
        return "in this call" if call else "no dump"
    if call is None:
        return "no call"
    return "not in a call" if call.done else "waiting"


def _rows(records: Records, hang: Hang) -> list[tuple[str, ...]]:
    """Return a row for each rank; if there are many, ranks that are alike share one."""
    alike: dict[tuple[str, ...], list[int]] = {}
    few = records.world_size <= _FEW
    for rank in _all(records):
        cells = _cells(records, hang, rank)
        alike.setdefault((str(rank) if few else "", *cells), []).append(rank)
    return [
        (ranks_in_words(ranks).split(" ", 1)[1] if not few else str(ranks[0]), *cells)
        for (_, *cells), ranks in alike.items()
    ]


def _cells(records: Records, hang: Hang, rank: int) -> tuple[str, ...]:
    call = _shown_call(records, hang, rank)
    state = _state(records, rank, call)
    if call is None:
        return (state, *[""] * (len(_TITLES) - 2))
    shape = "" if call.shape is None else str(list(call.shape))
    dtype = call.dtype if shape else ""
    group = number = ""
    if call.src is None and call.group[0] not in records.titles:
        group, number = records.name(call.group), str(call.number)
    return (state, group, number, operation(call), shape, dtype, spot(call))


def as_json(records: Records, hang: Hang) -> dict[str, Any]:
    """Return the finding for programs."""
    return {
        "kind": hang.kind,
        "differ": hang.differ or None,
        "sentence": hang.sentence,
        "world_size": records.world_size,
        "missing": records.missing,
        "absent": list(hang.absent),
        "calls": [_call(records, call) for call in hang.calls.values()],
        "ranks": [_rank(records, hang, rank) for rank in _all(records)],
        "notes": notes_on(records, hang),
        "explain": None if hang.kind == "finished" else concept_of(records, hang),
    }


def _rank(records: Records, hang: Hang, rank: int) -> dict[str, Any]:
    call = _shown_call(records, hang, rank)
    dump = records.dumps.get(rank)
    return {
        "rank": rank,
        "state": _state(records, rank, call),
        "file": None if dump is None else str(dump.path),
        "call": call and _call(records, call),
    }


def _call(records: Records, call: Call) -> dict[str, Any]:
    file, line = call.place or (None, None)
    return {
        "rank": call.rank,
        "group": call.group[0],
        "members": records.members(call.group),
        "number": call.number,
        "operation": call.op,
        "src": call.src,
        "dst": call.dst,
        "shape": None if call.shape is None else list(call.shape),
        "dtype": call.dtype or None,
        "finished": call.done,
        "file": file,
        "line": line,
    }
