"""Name the ranks that the records point at, as monitoring.suspects sees it.

    rank_0.jsonl  step 10   20   30   40 ┐   a row: the records of all ranks of the
    rank_1.jsonl  step 10   20   30   40 ┘   same steps, one Record of the unit each

The caller passes the unit, which is the learner's or the reference's. If the learner's
code raises an error or returns anything but lists of ranks, we turn that into a
sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from distlab.monitor.jsonl import Recorded
from distlab.monitor.records import StepRecord

RECENT_ROWS, RECENT_STEPS = 3, 20
"""We search for a straggler in at least this many of the newest rows, and steps."""


@dataclass(frozen=True, kw_only=True)
class Suspected:
    """The suspected ranks in ascending order; `whose` says whose code named them."""

    whose: str
    stragglers: tuple[int, ...] = ()
    desynchronized: tuple[int, ...] = ()
    nan_origin: tuple[int, ...] = ()
    nan_step: int | None = None  # in which an inf or nan came up first
    sentences: tuple[str, ...] = ()  # of functions that could not be used

    @property
    def ranks(self) -> frozenset[int]:
        """All ranks that were named for any reason."""
        return frozenset((*self.stragglers, *self.desynchronized, *self.nan_origin))


def rows_of(recorded: Recorded) -> list[list[StepRecord]]:
    """Return all ranks' records of the same steps, oldest first, in whole rows."""
    rows: dict[int, list[StepRecord]] = {}
    for records in recorded.records.values():
        for record in records:
            rows.setdefault(record.step, []).append(record)
    whole = (step for step in sorted(rows) if len(rows[step]) == len(recorded.records))
    return [rows[step] for step in whole]


def num_recent(rows: Sequence[Sequence[StepRecord]]) -> int:
    """Return how many of the newest rows to search for a straggler."""
    num_rows = num_steps = 0
    for row in reversed(rows):
        if num_rows >= RECENT_ROWS and num_steps >= RECENT_STEPS:
            break
        num_rows, num_steps = num_rows + 1, num_steps + row[0].num_steps
    return num_rows


def suspected(recorded: Recorded, unit: ModuleType, whose: str) -> Suspected:
    """Ask the unit's `stragglers`, `desynchronized` and `nan_origin`.

    The first gets the newest rows and the second only the newest one. The third gets
    all of them, because a nan stays, and only the first step with one tells the ranks
    apart.
    """
    rows = rows_of(recorded)
    if not rows:
        return Suspected(whose=whose)
    steps = [_as_unit_records(row, unit.Record) for row in rows]
    asked: dict[str, Callable[[], Any]] = {
        "stragglers": lambda: unit.stragglers(steps[-num_recent(rows) :]),
        "desynchronized": lambda: unit.desynchronized(steps[-1]),
        "nan_origin": lambda: unit.nan_origin(steps),
    }
    found: dict[str, tuple[int, ...]] = {}
    sentences = []
    for name, ask in asked.items():
        try:
            found[name] = _ranks(ask(), len(recorded.records))
        except Exception as error:  # the learner's code
            first = (str(error).splitlines() or [""])[0]
            sentences.append(f"{name}: {type(error).__name__}: {first}")
    nan_steps = [r.nonfinite_step for row in rows for r in row if r.nonfinite_step]
    return Suspected(
        whose=whose,
        **found,
        nan_step=min(nan_steps, default=None),
        sentences=tuple(sentences),
    )


def _as_unit_records(row: Sequence[StepRecord], record_of: Any) -> list[Any]:
    """Convert a row to the unit's records of one step, with means over its steps.

    If gradients were inf or nan in several of the row's steps, the first of these
    counts.
    """
    first = min((r.nonfinite_step for r in row if r.nonfinite_step), default=None)
    return [
        record_of(
            rank=one.rank,
            data_s=one.data_wait_s / one.num_steps,
            compute_s=one.compute_share * one.step_s,
            communication_s=one.communication_s / one.num_steps,
            loss=float("nan") if one.loss is None else one.loss,
            num_samples=one.samples,
            num_nonfinite=int(first is not None and one.nonfinite_step == first),
            checksum=one.checksum,
        )
        for one in row
    ]


def _ranks(value: Any, world_size: int) -> tuple[int, ...]:
    if not isinstance(value, list | tuple | set | frozenset):
        raise TypeError(f"a {type(value).__name__} came back, not a list of ranks")
    for rank in value:
        if type(rank) is not int or not 0 <= rank < world_size:
            raise ValueError(f"there is no rank {rank!r}")
    return tuple(sorted(value))
