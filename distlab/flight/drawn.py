"""The ranks' records as a run that `distlab.trace` can draw.

The recorder sees when a call begins. With gloo it doesn't see when a collective ends,
so a call that is over is drawn until the last of its ranks has entered it, which is the
earliest that it can have ended.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distlab.comm import ANY, Event
from distlab.flight.hang import current_call
from distlab.flight.records import Call, Records
from distlab.runner import RankRecord, Run
from distlab.runner.board import find_cycle
from distlab.runner.record import Outcome
from distlab.trace import to_html

_S = 1e-9
_TITLE = "The last calls of a job that hangs"


def draw(path: Path | str, records: Records, sentence: str, outcome: Outcome) -> None:
    """Write a page with a timeline of the recorded calls; see `run_of`.

    Raises:
        OSError: it cannot be written.
    """
    verdict = sentence[:1].upper() + sentence[1:]
    to_html(run_of(records, sentence, outcome), path, title=_TITLE, verdict=verdict)


def run_of(records: Records, sentence: str, outcome: Outcome) -> Run:
    """Return the recorded calls of all ranks as a run.

    `sentence` says what is wrong. In a `deadlock`, the ranks that wait do so forever.
    """
    entered = _last_entries(records)
    ranks = tuple(_rank(records, rank, entered) for rank in range(records.world_size))
    waits_for = _waits_for(records) if outcome == "deadlock" else {}
    times = [event["t"] for record in ranks for event in record.journal]
    return Run(
        world_size=records.world_size,
        outcome=outcome,
        ranks=ranks,
        seconds=max(times, default=0.0) - min(times, default=0.0),
        limit_s=0.0,
        waits_for=waits_for,
        cycle=find_cycle(waits_for),
        explanation=sentence,
    )


def _waits_for(records: Records) -> dict[int, tuple[int, ...]]:
    waits = {rank: _open(records, rank) for rank in records.dumps}
    found = {rank: _awaited(records, call) for rank, call in waits.items() if call}
    return {rank: peers for rank, peers in found.items() if peers}


def _key(call: Call) -> tuple[Any, ...]:
    """Calls with the same key belong together."""
    return (call.group, call.number, call.src, call.dst, call.tag)


def _last_entries(records: Records) -> dict[tuple[Any, ...], int]:
    found: dict[tuple[Any, ...], int] = {}
    for dump in records.dumps.values():
        for call in dump.calls:
            found[_key(call)] = max(found.get(_key(call), 0), call.created_ns)
    return found


def _open(records: Records, rank: int) -> Call | None:
    """The call in which the rank waits, if it does."""
    if rank in records.ended or rank not in records.dumps:
        return None
    call = current_call(records, rank)
    return None if call is None or call.done else call


def _rank(
    records: Records, rank: int, entered: dict[tuple[Any, ...], int]
) -> RankRecord:
    dump, waits = records.dumps.get(rank), _open(records, rank)
    calls = sorted(dump.calls if dump else (), key=lambda call: call.created_ns)
    journal: list[Event] = []
    waiting: Event | None = None
    for number, call in enumerate(calls, 1):
        event = _event(records, call, number)
        journal.append(event)
        if call.done:
            end = entered[_key(call)] * _S
            journal.append({"k": "exit", "n": number, "t": end})
        elif waits is not None and _key(call) == _key(waits):
            waiting = event
        else:
            event["k"] = "post"
    # At the same moment a call begins before it ends.
    journal.sort(key=lambda event: (event["t"], event["k"] == "exit"))
    ended = rank in records.ended
    return RankRecord(
        rank=rank,
        status="waiting" if waiting else "finished" if ended else "running",
        journal=journal,
        waiting=waiting,
    )


def _event(records: Records, call: Call, number: int) -> Event:
    file, line = call.place or ("", 0)
    is_message = call.src is not None
    shape = call.shape
    return {
        "k": "enter",
        "n": number,
        "t": call.created_ns * _S,
        "op": call.op,
        "group": call.group[0],
        # Messages have the ranks of the whole job.
        "members": [*range(records.world_size)]
        if is_message
        else records.members(call.group),
        "root": call.root,
        "dst": call.dst if call.op == "send" else None,
        "src": call.src if call.op == "recv" else None,
        "tag": call.tag,
        "shape": None if shape is None else list(shape),
        "dtype": call.dtype,
        "file": file,
        "line": line,
    }


def _awaited(records: Records, call: Call) -> tuple[int, ...]:
    """The ranks that haven't made the call with which this one would go on."""
    if call.src is not None:
        peer = call.src if call.op == "recv" else call.dst
        return () if peer is None or peer == ANY else (peer,)
    mine = _agreed(call)
    return tuple(
        rank
        for rank in records.members(call.group)
        if rank != call.rank
        and not any(
            _agreed(made) == mine
            for made in (records.dumps[rank].calls if rank in records.dumps else ())
        )
    )


def _agreed(call: Call) -> tuple[Any, ...]:
    """In what the ranks of a collective agree."""
    return (_key(call), call.op, call.shape, call.dtype, call.root, call.reduce_op)
