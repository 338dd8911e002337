"""How a run of `main` got stuck. Its calls are torch's own, so there is no journal.

A rank that has waited a few seconds in one call is told so by torch, with an error; the
line it comes from, on each rank, is what there is to go by.
"""

from __future__ import annotations

from distlab.curriculum import UnitSource
from distlab.grading.verdict import NotYetError
from distlab.runner import RankRecord, Run
from distlab.runner.autopsy import Evidence, own_frame, place

_WAITED = ("Timed out", "timed out", "timeout", "Timeout")
_FOLLOWS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def name_of_stuck(
    run: Run, source: UnitSource, patience_s: float
) -> NotYetError | None:
    """The verdict on ranks that waited for each other in vain, if they did."""
    stuck = [record for record in run.ranks if _waited(record)]
    if not stuck:
        return None
    first = stuck[0]
    done = [r.rank for r in run.ranks if r.status == "finished"]
    elsewhere = [
        r for r in run.ranks if r.rank != first.rank and _line(r) != _line(first)
    ]
    waited = f"rank {first.rank} waited {patience_s:g} s in line {_line(first)}"
    slug, rule = (
        "collective-mismatch",
        "every rank calls the same collectives in the same order",
    )
    if "init_process_group" in _text(source, _line(first)):
        slug = "typed-in-rank"
        message = f"{waited}, init_process_group: not all ranks met there"
        rule = "give it the backend only: torchrun has set the rest"
    elif done:
        message = f"{waited}, but rank {done[0]} had already finished"
    elif elsewhere:
        other = elsewhere[0]
        doing = "waited" if _waited(other) else "was"
        message = f"{waited}, while rank {other.rank} {doing} in line {_line(other)}"
    else:
        message = f"all ranks waited {patience_s:g} s in line {_line(first)} in vain"
    return NotYetError(
        message,
        slug=slug,
        evidence=tuple(_evidence(record) for record in run.ranks),
        rule=rule,
        kind="DEADLOCK",
        fatal=True,
    )


def _waited(record: RankRecord) -> bool:
    if record.error is None:
        return False
    return any(word in record.error.message for word in (*_WAITED, *_FOLLOWS))


def _line(record: RankRecord) -> int:
    frames = record.error.frames if record.error else record.stack
    frame = own_frame(frames)
    return frame[1] if frame else 0


def _text(source: UnitSource, line: int) -> str:
    lines = source.text.splitlines()
    return lines[line - 1] if 0 < line <= len(lines) else ""


def _evidence(record: RankRecord) -> Evidence:
    frame = own_frame(record.error.frames if record.error else record.stack)
    state = "waiting" if _waited(record) else record.status
    return Evidence(rank=record.rank, state=state, where=place(frame))
