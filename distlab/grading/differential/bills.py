"""What each scenario costs and changes, played by the learner's code and the reference.

What the reference does is the same every time: it is kept, by the reference's digest,
in the state folder, so that a learner's check plays it once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from distlab.comm import COLLECTIVES
from distlab.curriculum import Progress
from distlab.grading.diagnosis import diagnose
from distlab.grading.differential.observe import play_twice
from distlab.grading.harness import PlayedRuns
from distlab.grading.runs import Records, RunSpec
from distlab.grading.together import taken_apart
from distlab.grading.verdict import NotYetError
from distlab.runner import Run, RunnerError


@dataclass(frozen=True, kw_only=True)
class Bill:
    """What one scenario costs, by rank, and what its calls changed."""

    sent_bytes: tuple[float, ...]
    collectives: tuple[int, ...]
    operations: tuple[int, ...] | None  # None where they were not counted
    changes: tuple[frozenset[tuple[str, str]], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain lists."""
        changes = [sorted(map(list, own)) for own in self.changes]
        return {**vars(self), "changes": changes}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Bill:
        """What `to_json` made."""
        changes = tuple(frozenset(map(tuple, own)) for own in told["changes"])
        lists: dict[str, Any] = {
            name: None if values is None else tuple(values)
            for name, values in told.items()
            if name != "changes"
        }
        return cls(**lists, changes=changes)


@dataclass(frozen=True, kw_only=True)
class Twice:
    """The records of every scenario's second time, and what they cost."""

    records: Records
    bills: dict[RunSpec, Bill]


def played_twice(runs: PlayedRuns, specs: tuple[RunSpec, ...]) -> Twice:
    """Play all scenarios in one process, from last to first, and then all again.

    Raises:
        NotYetError: the ranks did not come to their end.
    """
    told: list[list[Any]] = [[] for _ in range(runs.world_size)]
    run = runs.on_ranks(play_twice, specs, told, times=2)
    if run.outcome != "finished":
        raise diagnose(run)
    parts = taken_apart(run, told, 2 * len(specs))[len(specs) :]
    seconds = dict(zip(specs, parts, strict=True))
    seen = zip(*run.values, strict=True)
    return Twice(
        records=seconds,
        bills={
            spec: _bill(part, own)
            for (spec, part), own in zip(seconds.items(), seen, strict=True)
        },
    )


def _bill(run: Run, seen: tuple[dict[str, Any], ...]) -> Bill:
    return Bill(
        sent_bytes=tuple(record.sent_bytes for record in run.ranks),
        collectives=tuple(
            sum(call["op"] in COLLECTIVES for call in record.calls())
            for record in run.ranks
        ),
        operations=None
        if any(own["operations"] is None for own in seen)
        else tuple(own["operations"] for own in seen),
        changes=tuple(frozenset(map(tuple, own["changes"])) for own in seen),
    )


def reference_bills(
    task: str, runs: PlayedRuns, specs: tuple[RunSpec, ...]
) -> tuple[dict[RunSpec, Bill], Twice | None]:
    """The reference's part, from the state folder or played now; then that as well.

    Raises:
        RunnerError: the reference itself does not come to its end.
    """
    reference = runs.impl.reference
    what = [reference.digest, judges_digest(reference.unit), str(runs.world_size)]
    what += map(str, specs)
    digest = hashlib.sha256("\n".join(what).encode()).hexdigest()[:12]
    path = _folder(reference.path) / f"{task}-{digest}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        bills = [
            Bill.from_json(told)
            for told in json.loads(path.read_text(encoding="utf-8"))
        ]
        return dict(zip(specs, bills, strict=True)), None
    try:
        twice = played_twice(runs.of(runs.impl.reference_alone), specs)
    except NotYetError as error:
        raise RunnerError(f"the reference of {task} fails: {error.message}") from error
    told = [twice.bills[spec].to_json() for spec in specs]
    with contextlib.suppress(OSError):  # without it the next check plays it again
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(told), encoding="utf-8")
    return twice.bills, twice


@cache
def judges_digest(unit: str) -> str:
    """What is played, and what is looked at, may change with the next version."""
    grading = Path(__file__).parents[1]
    rooms = ("differential", "book", "kit", f"checks/{unit}")
    files = sorted(file for room in rooms for file in (grading / room).glob("*.py"))
    return hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest()


def _folder(reference: Path) -> Path:
    return Progress(reference.parents[2]).folder / "reference"
