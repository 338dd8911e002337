"""The wrong solutions of a unit, one after another, in one run of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from distlab.curriculum import UnitSource, load_graft
from distlab.curriculum.compiled import received, sent
from distlab.grading.catalogue import Entry
from distlab.grading.harness import (
    Implementation,
    PlayedRuns,
    needed_reference,
    off_limits,
    prepared,
    transport,
)
from distlab.grading.mismatches import never_waited, unlike_collectives
from distlab.grading.runs import Records, RunSpec
from distlab.grading.together import play_reported, taken_apart
from distlab.runner import Limits, RankContext, Run, RunnerError
from distlab.runner.rank import resolve

TOGETHER = 12  # solutions in one run: one that fails holds up few others
RUN_S = 10.0  # a run takes tenths of a second
_RAISED = "this solution raised an error"


def implementation_of(reference: UnitSource, entry: Entry) -> Implementation:
    """The solution with the entry's mistake in it."""
    wrong = replace(reference, text=entry.applied_to(reference.text))
    return Implementation(wrong, reference)


@cache
def _sent(reference: UnitSource, entry: Entry) -> dict[str, str]:
    return sent(implementation_of(reference, entry).source)


def played(
    entries: Sequence[Entry],
    runs: PlayedRuns,
    specs: Sequence[RunSpec],
    seconds: float,
) -> Iterator[tuple[Entry, Records | None]]:
    """Each entry with its records, or None if it hangs or raises.

    The ranks, their number, and the seed are those of `runs`. When the time is up, the
    others are left out.
    """
    until = time.monotonic() + seconds
    for first in range(0, len(entries), TOGETHER):
        group = entries[first : first + TOGETHER]
        records = _records(group, runs, specs, until)
        if records is None and len(group) > 1:
            # A rank that is a call ahead meets the others in the next solution: then
            # nobody knows whose fault it is.
            for entry in group:
                alone = _records([entry], runs, specs, until)
                if time.monotonic() > until:
                    return
                yield entry, alone[0] if alone else None
        elif time.monotonic() > until:
            return
        else:
            whole: Sequence[Records | None] = records or [None] * len(group)
            yield from zip(group, whole, strict=True)


def _records(
    entries: Sequence[Entry],
    runs: PlayedRuns,
    specs: Sequence[RunSpec],
    until: float,
) -> list[Records] | None:
    """The records of these solutions in one run; None if it doesn't go well."""
    told: list[list[Any]] = [[] for _ in range(runs.world_size)]
    seconds = min(RUN_S, until - time.monotonic())
    if seconds <= 0:
        return None
    try:
        run = _run(entries, runs, specs, told, seconds)
    except RunnerError:
        return None
    parts = taken_apart(run, told, len(entries) * len(specs))
    if not parts or any(map(_is_wrong, parts)):
        return None
    whole = [parts[n : n + len(specs)] for n in range(0, len(parts), len(specs))]
    return [dict(zip(specs, own, strict=True)) for own in whole]


def _is_wrong(run: Run) -> bool:
    return _RAISED in run.values or bool(unlike_collectives(run) or never_waited(run))


def _run(
    entries: Sequence[Entry],
    runs: PlayedRuns,
    specs: Sequence[RunSpec],
    told: list[list[Any]],
    seconds: float,
) -> Run:
    impl = runs.impl.reference_alone
    return runs.cluster.run(
        play_each,
        runs.world_size,
        [_sent(impl.reference, entry) for entry in entries],
        needed_reference(impl),
        [[spec.name, {"seed": runs.seed, **dict(spec.values)}] for spec in specs],
        off_limits(impl),
        limits=Limits(seconds=seconds),
        on_report=lambda rank, value: told[rank].append(value),
        seed=runs.seed,
        backend=transport(runs.world_size),
        ranks_per_node=runs.ranks_per_node,
    )


def play_each(
    context: RankContext,
    sources: list[dict[str, str]],
    reference: dict[str, str],
    plays: list[tuple[str, dict[str, Any]]],
    off_limits: dict[str, list[str]],
) -> None:
    """The program of each rank: every scenario of every solution, reported."""
    context, (_, empty) = prepared(context, sources[0], reference, off_limits)
    for source in map(received, sources):
        for name, values in plays:
            module = load_graft(source, empty, [])
            play = partial(resolve(name), context, module, **values)
            play_reported(context, values["seed"], partial(_result_of, play))


def _result_of(play: Callable[[], Any]) -> Any:
    try:
        return play()
    except Exception:  # most raise on all ranks: then no rank waits for another
        return _RAISED
