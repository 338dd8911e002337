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
from distlab.grading.runs import Records, RunSpec
from distlab.grading.together import past, play_reported, taken_apart
from distlab.runner import Limits, RankContext, Run, RunnerError
from distlab.runner.rank import resolve

TOGETHER = 12  # solutions in one run: one that hangs holds up few others
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
    others are left out. Whatever ran in the same processes as a solution that raised
    runs again without it.
    """
    left, until = list(entries), time.monotonic() + seconds
    while left and (seconds := until - time.monotonic()) > 0:
        now, told = left[:TOGETHER], [list[Any]() for _ in range(runs.world_size)]
        try:
            run = _run(now, runs, specs, told, seconds)
        except RunnerError:
            return
        parts = taken_apart(run, told, len(now) * len(specs))
        if run.outcome == "timeout" and time.monotonic() > until:
            return
        whole = [parts[n : n + len(specs)] for n in range(0, len(parts), len(specs))]
        through = past(told) // len(specs)
        bad = [n for n, own in enumerate(whole) if any(map(_has_raised, own))]
        bad = bad if whole else [through]
        done = range(len(now)) if whole and not bad else bad
        for n in done:
            records = None if n in bad else dict(zip(specs, whole[n], strict=True))
            yield now[n], records
        gone = {now[n].id for n in done}
        left = [entry for entry in left if entry.id not in gone]


def _has_raised(run: Run) -> bool:
    return _RAISED in run.values


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
    except Exception:  # most raise on all ranks, and nobody waits for them
        return _RAISED
