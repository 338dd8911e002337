"""How a run of `main` got stuck. Its calls are torch's own, so there is no journal.

A rank that has waited a few seconds in one call is told so by torch, with an error; the
line it comes from, on each rank, is what there is to go by.
"""

from __future__ import annotations

from distlab.curriculum import UnitSource
from distlab.grading.mismatches import RULES
from distlab.grading.verdict import NotYetError
from distlab.runner import RankRecord, Run, RunnerError
from distlab.runner.autopsy import (
    Evidence,
    ended_by_transport,
    explain_end,
    own_frame,
    place,
)

_WAITED = ("Timed out", "timed out", "timeout", "Timeout")
_FOLLOWS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def name_of_stuck(
    run: Run, source: UnitSource, patience_s: float
) -> NotYetError | None:
    """The verdict on ranks that waited for each other in vain, if they did.

    Raises:
        RunnerError: none of them had come to the learner's code by then.
    """
    stuck = sorted(filter(_waited, run.ranks), key=_only_follows)
    if not stuck:
        return _sizes_differ(run)
    if not any(map(_line, run.ranks)):
        raise RunnerError(
            f"the ranks did not meet within {patience_s:g} s: this machine is too busy "
            "with other things; try again"
        )
    first = stuck[0]
    slug, rule = "collective-mismatch", RULES["collective-mismatch"]
    message = f"rank {first.rank} waited {patience_s:g} s in line {_line(first)}"
    if "init_process_group" in _text(source, _line(first)):
        slug = "typed-in-rank"
        message += ", init_process_group: not all ranks met there"
        rule = "give it the backend only: torchrun has set the rest"
    elif _only_follows(first):
        message = f"rank {first.rank} lost its connection in line {_line(first)}"
        message += _elsewhere(run, first, "")
    else:
        message += _elsewhere(run, first)
    return NotYetError(
        message,
        slug=slug,
        evidence=tuple(_evidence(record) for record in run.ranks),
        rule=rule,
        kind="DEADLOCK",
        fatal=True,
    )


def _sizes_differ(run: Run) -> NotYetError | None:
    """The verdict if gloo ended a rank, as it does where tensors' sizes differ."""
    ended = next(filter(ended_by_transport, run.ranks), None)
    if ended is None:
        return None
    return NotYetError(
        f"rank {ended.rank} {explain_end(ended)}",
        slug="collective-mismatch",
        evidence=tuple(_evidence(record) for record in run.ranks),
        rule=RULES["collective-mismatch"],
        fatal=True,
    )


def _elsewhere(run: Run, first: RankRecord, otherwise: str = " in vain") -> str:
    """What another rank did meanwhile, as the end of a sentence."""
    for record in run.ranks:
        if record.status == "finished":
            return f", but rank {record.rank} had already finished"
        if record.status == "died":
            return f"; rank {record.rank} {explain_end(record)}"
    for record in run.ranks:
        if _line(record) not in (0, _line(first)):
            return f", while rank {record.rank} was in line {_line(record)}"
    return otherwise


def _waited(record: RankRecord) -> bool:
    if record.error is None:
        return False
    return any(word in record.error.message for word in (*_WAITED, *_FOLLOWS))


def _only_follows(record: RankRecord) -> bool:
    """Whether this rank's error only tells that another one is gone."""
    message = record.error.message if record.error else ""
    return not any(word in message for word in _WAITED)


def _line(record: RankRecord) -> int:
    frames = record.error.frames if record.error else record.stack
    frame = own_frame(frames)
    return frame[1] if frame else 0


def _text(source: UnitSource, line: int) -> str:
    lines = source.text.splitlines()
    return lines[line - 1] if 0 < line <= len(lines) else ""


def _evidence(record: RankRecord) -> Evidence:
    frame = own_frame(record.error.frames if record.error else record.stack)
    state: str = "waiting" if _waited(record) else record.status
    state = "busy" if state == "running" else state
    return Evidence(rank=record.rank, state=state, where=place(frame))
