"""A run as a file for Perfetto (ui.perfetto.dev) and Chrome's about:tracing.

Source: Google, "Trace Event Format" (the JSON form), for the names of the fields:
`ph` X a complete event, b and e the two ends of an asynchronous one, s and f those of
an arrow, M names; `ts` and `dur` in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.trace.model import STATES, Trace

if TYPE_CHECKING:
    from distlab.runner import Run

MAX_EVENTS = 500_000  # about 80 MB; more than that no viewer opens with pleasure
_PID = 1
_PS_PER_US = 1_000_000

_FIELDS: dict[str, dict[str, Any]] = {
    "X": {"name": str, "ts": (int, float), "dur": (int, float), "tid": int},
    "M": {"name": str, "args": dict},
    "s": {"id": int, "ts": (int, float), "tid": int, "cat": str, "name": str},
    "f": {"id": int, "ts": (int, float), "tid": int, "cat": str, "name": str},
    "b": {"id": int, "ts": (int, float), "cat": str, "name": str},
    "e": {"id": int, "ts": (int, float), "cat": str, "name": str},
}


def to_perfetto(run: Run, path: Path | str, most: int = MAX_EVENTS) -> int:
    """Write `run` to `path`, at most `most` events of it; how many were left out.

    Written piece by piece: the file never stands in memory.

    Raises:
        OSError: it cannot be written.
    """
    from distlab.trace.journals import trace_of

    trace = trace_of(run)
    left_out, written = 0, 0
    with Path(path).open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ns","traceEvents":[\n')
        for number, events in enumerate(_groups(trace)):
            if number and written + len(events) > most:
                left_out += len(events)
                continue
            for event in events:
                file.write(("" if not written else ",\n") + json.dumps(event))
                written += 1
        note = {"clock": trace.clock, "sentence": trace.sentence, "left_out": left_out}
        file.write(f'\n],"otherData":{json.dumps(note)}}}\n')
    return left_out


def _groups(trace: Trace) -> Iterator[list[dict[str, Any]]]:
    """Events that belong together: the names, then each call, then each message."""
    yield _names(trace)
    for row in range(len(trace.calls)):
        yield [_call(trace, row)]
    for row in range(len(trace.messages)):
        yield _message(trace, row)


def _names(trace: Trace) -> list[dict[str, Any]]:
    process = {"ph": "M", "pid": _PID, "name": "process_name"}
    events = [{**process, "args": {"name": f"distlab: {trace.sentence}"}}]
    for rank in range(trace.world_size):
        facts = {"ph": "M", "pid": _PID, "tid": rank}
        events += [
            {**facts, "name": "thread_name", "args": {"name": f"rank {rank}"}},
            {**facts, "name": "thread_sort_index", "args": {"sort_index": rank}},
        ]
    return events


def _call(trace: Trace, row: int) -> dict[str, Any]:
    call = trace.calls.row(row)
    site = trace.sites[call["site"]]
    facts = {
        "tag": call["tag"],
        "bytes": call["num_bytes"],
        "state": STATES[call["state"]],
        "waited_us": (call["ready_ps"] - call["start_ps"]) / _PS_PER_US,
        "line": f"{site.file}:{site.line}",
    }
    return {
        "ph": "X",
        "pid": _PID,
        "tid": call["rank"],
        "name": trace.labels[call["label"]],
        "cat": trace.ops[call["op"]],
        "ts": call["start_ps"] / _PS_PER_US,
        "dur": (call["end_ps"] - call["start_ps"]) / _PS_PER_US,
        "args": facts,
    }


def _message(trace: Trace, row: int) -> list[dict[str, Any]]:
    """An arrow between two calls; without calls a stretch of time on its own."""
    m = trace.messages.row(row)
    both = {"pid": _PID, "id": row + 1, "cat": "message"}
    name = f"{m['src']} → {m['dst']}"
    start, end = m["start_ps"] / _PS_PER_US, m["end_ps"] / _PS_PER_US
    if m["sent"] < 0:
        facts = {"bytes": m["num_bytes"], "tag": m["tag"]}
        return [
            {**both, "ph": "b", "name": name, "ts": start, "args": facts},
            {**both, "ph": "e", "name": name, "ts": end},
        ]
    return [
        {**both, "ph": "s", "name": name, "tid": m["src"], "ts": start},
        {**both, "ph": "f", "bp": "e", "name": name, "tid": m["dst"], "ts": end},
    ]


def faults_in(path: Path | str) -> list[str]:
    """What a viewer would stumble over in such a file: one line each, none if sound."""
    try:
        whole = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        return [f"not JSON: {error}"]
    events = whole.get("traceEvents") if isinstance(whole, dict) else None
    if not isinstance(events, list):
        return ["no list named traceEvents"]
    faults = [f for i, e in enumerate(events) for f in _faults_of(i, e)]
    return faults or _halves(events)


def _faults_of(number: int, event: Any) -> list[str]:
    fields = _FIELDS.get(event.get("ph", "")) if isinstance(event, dict) else None
    if fields is None:
        return [f"event {number}: no known phase"]
    faults = [
        f"event {number}: {name} is missing or of the wrong kind"
        for name, kind in {"pid": int, **fields}.items()
        if not isinstance(event.get(name), kind)
    ]
    times = [event.get(name) for name in ("ts", "dur")]
    if any(isinstance(time, (int, float)) and time < 0 for time in times):
        faults.append(f"event {number}: a time below zero")
    return faults


def _halves(events: list[dict[str, Any]]) -> list[str]:
    """Arrows and stretches that lack one of their ends, or have them the wrong way."""
    begun: dict[int, dict[str, Any]] = {}
    faults = []
    for event in events:
        if event["ph"] in "sb":
            begun[event["id"]] = event
        elif event["ph"] in "fe":
            first = begun.pop(event["id"], None)
            if first is None:
                faults.append(f"id {event['id']}: an end without a beginning")
            elif first["ts"] > event["ts"]:
                faults.append(f"id {event['id']}: it ends before it begins")
    return faults + [f"id {number}: a beginning without an end" for number in begun]
