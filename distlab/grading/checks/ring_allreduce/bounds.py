"""Checks of 3.1, `ring_allreduce.chunk_bounds`: many lengths, cut by one process."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from distlab.grading.clause import clause
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY, Evidence

Bounds = list[tuple[int, int]]

CASES = (
    *((10, 4), (12, 4), (13, 4), (15, 4), (9, 8), (7, 3), (5, 1)),
    *((3, 3), (2, 3), (1, 4), (0, 3), (0, 1), (3, 7), (1_000_003, 64)),
)
"""(length, num_chunks): with and without a remainder, fewer elements than chunks."""
SWEPT = tuple((length, n) for n in range(1, 17) for length in range(5 * n))
"""Every small length: bounds computed in floats are wrong at a few of them only."""
_MANY = 1000  # pairs that are read of what came back
RULE = "chunk i ends where chunk i + 1 begins; the first begins at 0"


def cases(seed: int) -> list[tuple[int, int]]:
    """Some in front that tell most; some that depend on the seed; all small ones."""
    draw = random.Random(seed)
    drawn = [(draw.randint(10, 5000), draw.randint(2, 60)) for _ in range(6)]
    return [*CASES, *drawn, *SWEPT]


def cut_lengths(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """The bounds of each case, or what they are instead."""
    found = []
    for length, num_chunks in cases(seed):
        with in_call(f"chunk_bounds({length}, {num_chunks})"):
            found.append(read_bounds(unit.chunk_bounds(length, num_chunks)))
    return found


def read_bounds(value: Any) -> Bounds | str:
    """Pairs of integers, or what it is instead, to go on after "chunk_bounds"."""
    if value is None:
        return "returned None, expected a list of pairs: is a return missing?"
    try:
        pairs = [tuple(pair) for pair in list(value)[:_MANY]]
    except TypeError:
        return f"returned {value!r:.40}, expected a list of pairs (start, end)"
    bounds = []
    for pair in pairs:
        try:
            start, end = map(operator.index, pair)
        except (TypeError, ValueError):
            return f"returned a list with {pair!r:.40}, expected pairs of integers"
        bounds.append((start, end))
    return bounds


def _cuts(runs: Runs) -> Iterator[tuple[str, int, int, Any]]:
    found = worked_out(runs, cut_lengths).values[0]
    for (length, n), bounds in zip(cases(runs.seed), found, strict=True):
        call = f"chunk_bounds({length}, {n})"
        yield call, length, n, bounds


@clause("ring_allreduce.chunk_bounds", "C1", worlds=(1,), runs=[on_ranks(cut_lengths)])
def nothing_lost_nothing_twice(runs: Runs) -> str | None:
    """There are n chunks: each begins where the one before ends, from 0 to length."""
    for call, length, n, bounds in _cuts(runs):
        if isinstance(bounds, str):
            raise NotYetError(f"{call} {bounds}", rule=RULE, fatal=True)
        flaw, slug = _flaw(call, length, n, [tuple(pair) for pair in bounds])
        if flaw:
            shown = _drawn(bounds, at_end=flaw.startswith("the last"))
            raise NotYetError(flaw, slug=slug, evidence=shown, rule=RULE)
    return "13 elements, 4 chunks: 3 or 4 in each; 1 element: three chunks are empty"


def _flaw(call: str, length: int, n: int, bounds: Bounds) -> tuple[str, str]:
    """What is wrong with these bounds, and the name of the mistake; or nothing."""
    if len(bounds) != n:
        slug = "fewer-chunks" if len(bounds) < n else ""
        plural = "s" * (len(bounds) != 1)
        return f"{call} returned {len(bounds)} chunk{plural}, expected {n}", slug
    place = 0
    for number, (start, end) in enumerate(bounds):
        chunk = f"in {call}, chunk {number} is ({start}, {end})"
        if start != place:
            where = f"where chunk {number - 1} ends" if number else "the first element"
            return f"{chunk}, expected it to start at {place}, {where}", ""
        if end < start:
            return f"{chunk}, expected an end that is not before the start", ""
        place = end
    last = f"the last chunk of {call} ends at {place}"
    if place < length:
        slug = "remainder-dropped" if place == length // n * n else ""
        left_out = f"the last {length - place} elements are in no chunk"
        if length - place == 1:
            left_out = "the last element is in no chunk"
        return f"{last}, expected {length}: {left_out}", slug
    if place > length:
        return f"{last}, beyond the tensor, expected {length}", ""
    return "", ""


def _drawn(bounds: Bounds, *, at_end: bool = False) -> tuple[Evidence, ...]:
    """The first chunks, or the last ones."""
    lines = [
        Evidence(NOBODY, f"chunk {number}", f"({start}, {end})")
        for number, (start, end) in enumerate(bounds)
    ]
    return tuple(lines[-8:] if at_end else lines[:8])


@clause("ring_allreduce.chunk_bounds", "C2", worlds=(1,), runs=[on_ranks(cut_lengths)])
def nearly_equal(runs: Runs) -> str | None:
    """The longest chunk has at most one element more than the shortest."""
    for call, length, n, bounds in _cuts(runs):
        if isinstance(bounds, str) or _flaw(call, length, n, bounds)[0]:
            raise NotJudgedError("some elements are in no chunk or in two: see C1")
        sizes = [end - start for start, end in bounds]
        if max(sizes) > min(sizes) + 1:
            raise NotYetError(
                f"in {call}, the longest chunk has {max(sizes)} elements and the "
                f"shortest {min(sizes)}, expected a difference of at most 1",
                slug="uneven-chunks",
                evidence=_drawn(bounds),
                rule="in each step of the ring all ranks wait for the longest chunk: "
                "distribute the remainder, one element per chunk",
            )
    return None
