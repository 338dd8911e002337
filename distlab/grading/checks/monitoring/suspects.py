"""Checks of 4.2, `monitoring.suspects`: C1 to C3, on steps that were recorded."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from distlab.grading.checks.monitoring.histories import (
    History,
    poisoned,
    replicas,
    slow_ones,
)
from distlab.grading.checks.monitoring.recorded import Step, records
from distlab.grading.clause import clause
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import Evidence

TASK = "monitoring.suspects"
_LINES, _STEPS = 6, 5  # ranks and steps in the evidence


def read_ranks(told: Any) -> list[int] | str:
    """Ranks in ascending order, or what was returned instead."""
    if told is None:
        return "returns None: is a return missing?"
    try:
        return sorted(operator.index(rank) for rank in told)
    except TypeError:
        return f"returns {told!r:.50}, not a list of ranks"


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


# ── mistakes ────────────────────────────────────────────────────────────────────────


class Mistake(NamedTuple):
    """A known misconception: what it finds in steps, and what is said of it."""

    slug: str
    sentence: str
    rule: str
    finds: Callable[[list[Step]], list[int]]


def _own(step: Step) -> dict[int, float]:
    return {row.rank: row.own_s for row in step}


def _late(own: dict[int, float], limit: Callable[[list[float]], float]) -> list[int]:
    """Ranks above 1.5 times what `limit` makes of the other ranks' seconds."""
    return [
        rank
        for rank, own_s in own.items()
        if len(own) > 1 and own_s > 1.5 * limit([own[o] for o in own if o != rank])
    ]


def _often(steps: list[Step], late: Callable[[Step], Sequence[int]]) -> list[int]:
    named = [rank for step in steps for rank in late(step)]
    return sorted({rank for rank in named if 2 * named.count(rank) > len(steps)})


def _averaged(steps: list[Step]) -> list[int]:
    """By the mean over the steps, not by how many of them were slow."""
    ranks = [row.rank for row in steps[0]]
    by_step = [_own(step) for step in steps]
    return sorted(
        _late({r: statistics.mean(own[r] for own in by_step) for r in ranks}, _middle)
    )


_middle = statistics.median


def _waiting(step: Step) -> list[int]:
    waits = {row.rank: row.communication_s for row in step}
    return _late(waits, _middle)


def _late_of_all(step: Step) -> list[int]:
    own = _own(step)
    limit = 1.5 * _middle(own.values())
    return [rank for rank, own_s in own.items() if own_s > limit]


def _of_positions(steps: list[Step]) -> list[int]:
    own = [[row.own_s for row in step] for step in steps]
    renamed = [
        [row._replace(rank=place) for place, row in enumerate(step)] for step in steps
    ]
    return _often(renamed, lambda step: _late(_own(step), _middle)) if own else []


SLOW = (
    Mistake(
        "waits-not-late",
        "communication_s was compared, which is long for the ranks that wait",
        "a late rank has a long data_s or compute_s, and a short communication_s",
        lambda steps: _often(steps, _waiting),
    ),
    Mistake(
        "one-slow-step",
        "a rank that was slow in few steps was named",
        "count the steps in which a rank is late: more than half of them",
        lambda steps: sorted({r for s in steps for r in _late(_own(s), _middle)}),
    ),
    Mistake(
        "one-slow-step",
        "the seconds were averaged over the steps: one long step decides",
        "count the steps in which a rank is late: more than half of them",
        _averaged,
    ),
    Mistake(
        "one-slow-step",
        "only the last step was looked at",
        "count the steps in which a rank is late: more than half of them",
        lambda steps: sorted(_late(_own(steps[-1]), _middle)),
    ),
    Mistake(
        "position-not-rank",
        "positions in the list were named, not ranks",
        "the rank is in the record: record.rank",
        _of_positions,
    ),
    Mistake(
        "",
        "data_s was not counted",
        "a rank's own time is data_s + compute_s",
        lambda steps: _often(
            steps, lambda s: _late({r.rank: r.compute_s for r in s}, _middle)
        ),
    ),
    Mistake(
        "",
        "each rank was compared with the fastest rank",
        "compare with the median of the other ranks",
        lambda steps: _often(steps, lambda s: _late(_own(s), min)),
    ),
    Mistake(
        "",
        "the median was that of all ranks, and one of two is half of it",
        "compare with the median of the other ranks, without the rank's own time",
        lambda steps: _often(steps, _late_of_all),
    ),
)


def _unlike(step: Step, right: int) -> list[int]:
    return sorted(row.rank for row in step if row.checksum != right)


def _commonest(step: Step) -> int:
    sums = [row.checksum for row in step]
    return max(sums, key=sums.count)


UNLIKE = (
    Mistake(
        "one-rank-is-right",
        "each rank was compared with the first record's",
        "compare with the checksum that more than half of the ranks have",
        lambda steps: _unlike(steps[0], steps[0][0].checksum),
    ),
    Mistake(
        "one-rank-is-right",
        "each rank was compared with the lowest rank's",
        "compare with the checksum that more than half of the ranks have",
        lambda steps: _unlike(steps[0], min(steps[0]).checksum),
    ),
    Mistake(
        "no-majority",
        "a checksum that at most half of the ranks have was taken for the right one",
        "without a majority nothing tells which replica is right: name all ranks",
        lambda steps: _unlike(steps[0], _commonest(steps[0])),
    ),
    Mistake(
        "position-not-rank",
        "positions in the list were named, not ranks",
        "the rank is in the record: record.rank",
        lambda steps: [
            place
            for place, row in enumerate(steps[0])
            if 2 * sum(row.checksum == other.checksum for other in steps[0])
            <= len(steps[0])
        ],
    ),
)


def _bad(step: Step) -> list[int]:
    return sorted(row.rank for row in step if row.num_nonfinite)


def _first_bad(steps: list[Step]) -> Step:
    return next((step for step in steps if _bad(step)), [])


POISONED = (
    Mistake(
        "nan-after-reduce",
        "ranks were named that had it later: after the all_reduce every rank has it",
        "look at the first step in which num_nonfinite is above 0 on some rank",
        lambda steps: _bad(steps[-1]),
    ),
    Mistake(
        "nan-after-reduce",
        "every rank that ever had one was named",
        "look at the first step in which num_nonfinite is above 0 on some rank",
        lambda steps: sorted({rank for step in steps for rank in _bad(step)}),
    ),
    Mistake(
        "",
        "the first losses that are nan were looked at, not the gradients",
        "a rank without samples has the loss nan, and nothing is wrong there",
        lambda steps: next(
            (
                sorted(row.rank for row in step if math.isnan(row.loss))
                for step in steps
                if any(math.isnan(row.loss) for row in step)
            ),
            [],
        ),
    ),
    Mistake(
        "",
        "only one of the ranks of that step was named",
        "",
        lambda steps: _bad(_first_bad(steps))[:1],
    ),
    Mistake(
        "position-not-rank",
        "positions in the list were named, not ranks",
        "the rank is in the record: record.rank",
        lambda steps: [k for k, r in enumerate(_first_bad(steps)) if r.num_nonfinite],
    ),
)


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
            raise NotYetError(f"{function} {told}")
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
        named = f"{function} names {_listed(told)}, expected {_listed(history.ranks)}"
        raise NotYetError(
            f"{history.what}: {named}" + (f"; {mistake.sentence}" if mistake else ""),
            slug=mistake.slug if mistake else "",
            evidence=tuple(words(history)),
            rule=mistake.rule if mistake else "",
        )


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
        own = " ".join(f"{row.own_s:.1f}" for row in rows[:_STEPS])
        wait = " ".join(f"{row.communication_s:.1f}" for row in rows[:_STEPS])
        more = " …" * (len(rows) > _STEPS)
        words = f"own {own}{more}  communication {wait}{more}"
        yield Evidence(rank=rank, state="s", text=words)


def _of_checksums(history: History) -> Iterator[Evidence]:
    for row in history.steps[0][:_LINES]:
        yield Evidence(rank=row.rank, state="checksum", text=str(row.checksum))


def _of_counts(history: History) -> Iterator[Evidence]:
    for rank in sorted(row.rank for row in history.steps[0])[:_LINES]:
        rows = [row for step in history.steps for row in step if row.rank == rank]
        counts = " ".join(str(row.num_nonfinite) for row in rows)
        yield Evidence(rank=rank, state="num_nonfinite", text=f"{counts}, by step")


@clause(TASK, "C1", worlds=(1,), runs=[on_ranks(find_stragglers)])
def late_again_and_again(runs: Runs) -> str | None:
    """V: who is late, in most steps; not who waits, not one pause."""
    found = worked_out(runs, find_stragglers).values[0]
    _expect("stragglers", found, slow_ones(runs.seed), SLOW, _of_time)
    return None


@clause(TASK, "C2", worlds=(1,), runs=[on_ranks(find_desynchronized)])
def unlike_the_majority(runs: Runs) -> str | None:
    """V: a majority decides, or nothing does."""
    found = worked_out(runs, find_desynchronized).values[0]
    _expect("desynchronized", found, replicas(runs.seed), UNLIKE, _of_checksums)
    return None


@clause(TASK, "C3", worlds=(1,), runs=[on_ranks(find_origin)])
def where_it_came_up(runs: Runs) -> str | None:
    """V: the first step in which the ranks differ."""
    found = worked_out(runs, find_origin).values[0]
    _expect("nan_origin", found, poisoned(runs.seed), POISONED, _of_counts)
    return None
