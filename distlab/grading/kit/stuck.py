"""How a run of `main` got stuck. Its calls are torch's own, so there is no journal.

torch raises an error in a rank that has waited a few seconds in one call. The verdict
names the line of `main` in which each rank was.
"""

from __future__ import annotations

import ast
from pathlib import Path

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
_JOINING = ("torch_group.py", "torchrun_env.py")
_FOLLOWS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


class _Lines:
    """Where each rank was: in main, also where main had called another function."""

    def __init__(self, source: UnitSource) -> None:
        self._source = source
        self._main = {
            line
            for node in source.tree.body
            if isinstance(node, ast.FunctionDef) and node.name == "main"
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }

    def frame(self, record: RankRecord) -> tuple[str, int] | None:
        """File and line, where the rank had come to the learner's code."""
        frames = record.error.frames if record.error else record.stack
        inside = [
            (file, line)
            for file, line in frames
            if Path(file).name == self._source.path.name and line in self._main
        ]
        return inside[-1] if inside else own_frame(frames)

    def of(self, record: RankRecord) -> int:
        """The line, or 0."""
        frame = self.frame(record)
        return frame[1] if frame else 0

    def where(self, record: RankRecord) -> str:
        """The line, or that the rank was past all of them."""
        line = self.of(record)
        return f"in line {line}" if line else "in a collective of torch"

    def text(self, record: RankRecord) -> str:
        """What stands in that line."""
        lines, line = self._source.text.splitlines(), self.of(record)
        return lines[line - 1] if 0 < line <= len(lines) else ""


def name_of_stuck(
    run: Run, source: UnitSource, patience_s: float
) -> NotYetError | None:
    """The verdict on ranks that waited for each other in vain, if they did.

    Raises:
        RunnerError: they had not met before the learner's code was called.
    """
    stuck = sorted(filter(_waited, run.ranks), key=_only_follows)
    lines = _Lines(source)
    is_in_source = any(map(lines.of, run.ranks))
    if not stuck or not is_in_source:
        named = _sizes_differ(run, lines)  # then the others have lost a connection
        if named or not stuck:
            return named
        if any(map(_joins, stuck)):
            raise RunnerError(
                f"the ranks did not meet within {patience_s:g} s: this machine is too "
                "busy with other things; try again"
            )
    first = stuck[0]
    slug, rule = "collective-mismatch", RULES["collective-mismatch"]
    message = f"rank {first.rank} waited {patience_s:g} s {lines.where(first)}"
    if "init_process_group" in lines.text(first):
        slug = "typed-in-rank"
        message += ", init_process_group: not all ranks connected"
        rule = "pass the backend only: torchrun has set the rest"
    elif _only_follows(first):
        message = f"rank {first.rank} lost its connection {lines.where(first)}"
        message += _elsewhere(run, first, lines, "")
    else:
        message += _elsewhere(run, first, lines)
    return NotYetError(
        message,
        slug=slug,
        evidence=tuple(_evidence(record, lines) for record in run.ranks),
        rule=rule,
        kind="DEADLOCK",
        fatal=True,
    )


def _sizes_differ(run: Run, lines: _Lines) -> NotYetError | None:
    """The verdict if gloo ended a rank, as it does where tensors' sizes differ."""
    ended = next(filter(ended_by_transport, run.ranks), None)
    if ended is None:
        return None
    return NotYetError(
        f"rank {ended.rank} {explain_end(ended)}",
        slug="collective-mismatch",
        evidence=tuple(_evidence(record, lines) for record in run.ranks),
        rule=RULES["collective-mismatch"],
        fatal=True,
    )


def _elsewhere(
    run: Run, first: RankRecord, lines: _Lines, otherwise: str = " in vain"
) -> str:
    """What another rank did meanwhile, as the end of a sentence."""
    for record in run.ranks:
        if record.status == "finished":
            return f", but rank {record.rank} had already finished"
        if record.status == "died":
            return f"; rank {record.rank} {explain_end(record)}"
    for record in run.ranks:
        if lines.of(record) not in (0, lines.of(first)):
            return f", while rank {record.rank} was in line {lines.of(record)}"
    return otherwise


def _waited(record: RankRecord) -> bool:
    if record.error is None:
        return False
    return any(word in record.error.message for word in (*_WAITED, *_FOLLOWS))


def _joins(record: RankRecord) -> bool:
    """Whether it was still on the way into the group that a scenario makes."""
    frames = record.error.frames if record.error else record.stack
    return any(Path(file).name in _JOINING for file, _ in frames)


def _only_follows(record: RankRecord) -> bool:
    """Whether this rank's error only tells that another one is gone."""
    message = record.error.message if record.error else ""
    return not any(word in message for word in _WAITED)


def _evidence(record: RankRecord, lines: _Lines) -> Evidence:
    frame = lines.frame(record)
    state: str = "waiting" if _waited(record) else record.status
    state = "busy" if state == "running" else state
    return Evidence(rank=record.rank, state=state, where=place(frame))
