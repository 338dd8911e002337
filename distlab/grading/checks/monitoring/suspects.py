"""Checks of 4.2, `monitoring.suspects`: C1 to C3, on steps that were recorded."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from distlab.grading.checks.monitoring.histories import (
    History,
    poisoned,
    replicas,
    slow_ones,
)
from distlab.grading.checks.monitoring.misnamed import (
    POISONED,
    SLOW,
    UNLIKE,
    Mistake,
)
from distlab.grading.checks.monitoring.recorded import records
from distlab.grading.clause import clause
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import Evidence

TASK = "monitoring.suspects"
_LINES, _STEPS = 6, 5  # ranks and steps in the evidence


def read_ranks(told: Any) -> list[int] | str:
    """Ranks as they were returned, or what was returned instead."""
    if told is None:
        return "returned None: is a return missing?"
    try:
        return [operator.index(rank) for rank in told]
    except TypeError:
        return f"returned {told!r:.50}, expected a list of ranks"


def find_stragglers(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """What stragglers returns for each history."""
    found = []
    for history in slow_ones(seed):
        steps = [records(unit, step) for step in history.steps]
        with in_call(f"stragglers, {history.what}"):
            found.append(read_ranks(unit.stragglers(steps)))
    return found


def find_desynchronized(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """What desynchronized returns for each history."""
    found = []
    for history in replicas(seed):
        with in_call(f"desynchronized, {history.what}"):
            told = unit.desynchronized(records(unit, history.steps[0]))
            found.append(read_ranks(told))
    return found


def find_origin(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """What nan_origin returns for each history."""
    found = []
    for history in poisoned(seed):
        steps = [records(unit, step) for step in history.steps]
        with in_call(f"nan_origin, {history.what}"):
            found.append(read_ranks(unit.nan_origin(steps)))
    return found


# ── verdicts ────────────────────────────────────────────────────────────────────────


def _expect(
    function: str,
    found: list[Any],
    histories: list[History],
    mistakes: Sequence[Mistake],
    words: Callable[[History], Iterator[Evidence]],
) -> None:
    """The ranks of each history; a mistake is named if it explains all answers.

    Raises:
        NotYetError: other ranks were named.
    """
    for told, history in zip(found, histories, strict=True):
        if isinstance(told, str):
            raise NotYetError(f"`{function}` {told}")
        if told == history.ranks:
            continue
        mistake = next(
            (
                m
                for m in mistakes
                if all(
                    answer == m.finds(h.steps)
                    for answer, h in zip(found, histories, strict=True)
                )
            ),
            None,
        )
        if sorted(told) == history.ranks:
            raise NotYetError(
                f"`{function}` returned the ranks {told}, expected the ascending order "
                f"{history.ranks}",
                rule="sorted(…) of ranks as numbers",
            )
        only = "only " * (set() < set(told) < set(history.ranks))
        named = f"`{function}` named {only}{_pair(told, history.ranks)}"
        raise NotYetError(
            f"{history.what}, {named}" + (f": {mistake.sentence}" if mistake else ""),
            slug=mistake.slug if mistake else "",
            evidence=tuple(words(history)),
            rule=mistake.rule if mistake else "",
        )


def _pair(told: Sequence[int], right: Sequence[int]) -> str:
    """Both lists of ranks; of a long one beside a short one only the length."""
    words = [_listed(told), _listed(right)]
    for place, (one, other) in enumerate(((told, right), (right, told))):
        if len(one) > 3 >= len(other):
            words[place] = f"{len(one)} ranks"
    return ", expected ".join(words)


def _listed(ranks: Sequence[int]) -> str:
    if not ranks:
        return "no rank"
    more = f" and {len(ranks) - 4} more" if len(ranks) > 5 else ""
    shown = ranks[:4] if more else ranks
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, shown))}{more}"


def _of_time(history: History) -> Iterator[Evidence]:
    """Own seconds and communication of the ranks that count, over the steps."""
    ranks = sorted(row.rank for row in history.steps[0])
    for rank in [*history.ranks, *(r for r in ranks if r not in history.ranks)][
        :_LINES
    ]:
        rows = [row for step in history.steps for row in step if row.rank == rank]
        own = " ".join(f"{row.own_s:.3g}" for row in rows[:_STEPS])
        wait = " ".join(f"{row.communication_s:.3g}" for row in rows[:_STEPS])
        more = " …" * (len(rows) > _STEPS)
        words = f"own {own}{more}  communication {wait}{more}"
        yield Evidence(rank, "s", words)


def _of_checksums(history: History) -> Iterator[Evidence]:
    for row in history.steps[0][:_LINES]:
        yield Evidence(row.rank, "checksum", str(row.checksum))


def _of_counts(history: History) -> Iterator[Evidence]:
    for rank in sorted(row.rank for row in history.steps[0])[:_LINES]:
        rows = [row for step in history.steps for row in step if row.rank == rank]
        counts = " ".join(str(row.num_nonfinite) for row in rows)
        no_loss = [str(k) for k, row in enumerate(rows, 1) if math.isnan(row.loss)]
        more = f"  loss nan in step {', '.join(no_loss)}" if no_loss else ""
        yield Evidence(rank, "num_nonfinite", f"{counts}{more}")


@clause(TASK, "C1", worlds=(1,), runs=[on_ranks(find_stragglers)])
def late_again_and_again(runs: Runs) -> str | None:
    """Who is late, in most steps; not who waits, not one pause."""
    found = worked_out(runs, find_stragglers).values[0]
    _expect("stragglers", found, slow_ones(runs.seed), SLOW, _of_time)
    return None


@clause(TASK, "C2", worlds=(1,), runs=[on_ranks(find_desynchronized)])
def unlike_the_majority(runs: Runs) -> str | None:
    """A majority decides, or nothing does."""
    found = worked_out(runs, find_desynchronized).values[0]
    _expect("desynchronized", found, replicas(runs.seed), UNLIKE, _of_checksums)
    return None


@clause(TASK, "C3", worlds=(1,), runs=[on_ranks(find_origin)])
def where_it_came_up(runs: Runs) -> str | None:
    """The first step in which the ranks differ."""
    found = worked_out(runs, find_origin).values[0]
    _expect("nan_origin", found, poisoned(runs.seed), POISONED, _of_counts)
    return None
