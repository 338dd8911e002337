"""The journals of simulated ranks, as the records in which a hang is looked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.flight.records import Call, Dump, Group, Records

if TYPE_CHECKING:
    from distlab.runner import RankRecord, Run

_WORLD = "world"  # the journal's name of the default group
_NS = 1e9


def records_of(run: Run) -> Records:
    """The calls of all ranks of a run that wrote journals."""
    dumps = {record.rank: _dump(record) for record in run.ranks}
    return Records(dumps, run.world_size, {_WORLD: "default_pg"})


def _dump(record: RankRecord) -> Dump:
    counts: dict[Any, int] = {}
    ended = {e["n"] for e in record.journal if e["k"] in ("exit", "error")}
    waited = {e["n"] for e in record.journal if e["k"] in ("enter", "wait")}
    calls = [
        # What was started and is not waited for holds nobody up.
        _call(record.rank, e, e["n"] in ended or e["n"] not in waited, counts)
        for e in record.calls()
        if e["op"] != "new_group"
    ]
    return Dump(
        rank=record.rank,
        path=Path(),
        backend="sim",
        calls=tuple(calls),
        names={},
        listed=0,
        whole=True,
    )


def _call(rank: int, event: Any, done: bool, counts: dict[Any, int]) -> Call:
    members = tuple(event["members"])
    group: Group = (event["group"], members)
    src = dst = None
    if event["op"] == "send":
        src, dst = rank, members[event["dst"]]
    elif event["op"] == "recv" and isinstance(event["src"], int):
        src, dst = members[event["src"]], rank
    kind = (group, src, dst)
    counts[kind] = counts.get(kind, 0) + 1
    shape, into = event.get("shape"), event.get("into_shape")
    place = (event["file"], event["line"]) if event.get("file") else None
    return Call(
        rank=rank,
        group=group,
        number=counts[kind],
        op=event["op"],
        src=src,
        dst=dst,
        inputs=() if shape is None else (tuple(shape),),
        outputs=() if into is None else (tuple(into),),
        dtype=event.get("dtype") or event.get("into_dtype") or "",
        done=done,
        created_ns=round(event["t"] * _NS),
        place=place,
    )
