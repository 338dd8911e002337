"""What known misconceptions find in the steps of 4.2: the ranks that each names."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from distlab.grading.checks.monitoring.recorded import Step


class Mistake(NamedTuple):
    """A known misconception: what it finds in steps, and what is said of it."""

    slug: str
    sentence: str
    rule: str
    finds: Callable[[list[Step]], list[int]]


def _own(step: Step) -> dict[int, float]:
    return {row.rank: row.own_s for row in step}


def _late(
    own: dict[int, float],
    limit: Callable[[list[float]], float],
    above: Callable[[float, float], bool] = operator.gt,
) -> list[int]:
    """Ranks above 1.5 times what `limit` makes of the other ranks' seconds."""
    return [
        rank
        for rank, own_s in own.items()
        if len(own) > 1
        and above(own_s, 1.5 * limit([own[o] for o in own if o != rank]))
    ]


def _often(
    steps: list[Step], late: Callable[[Step], Sequence[int]], *, or_half: bool = False
) -> list[int]:
    named = [rank for step in steps for rank in late(step)]
    limit = len(steps) - or_half
    return sorted({rank for rank in named if 2 * named.count(rank) > limit})


def _over_steps(steps: list[Step], one: Callable[[list[float]], float]) -> list[int]:
    """By one number for all steps, not by how many of them were slow."""
    ranks = [row.rank for row in steps[0]]
    by_step = [_own(step) for step in steps]
    return sorted(_late({r: one([own[r] for own in by_step]) for r in ranks}, _middle))


_middle = statistics.median


def _waiting(step: Step) -> list[int]:
    waits = {row.rank: row.communication_s for row in step}
    return _late(waits, _middle)


def _late_of_all(step: Step) -> list[int]:
    own = _own(step)
    limit = 1.5 * _middle(own.values())
    return [rank for rank, own_s in own.items() if own_s > limit]


def _of_positions(steps: list[Step]) -> list[int]:
    renamed = [
        [row._replace(rank=place) for place, row in enumerate(step)] for step in steps
    ]
    return _often(renamed, lambda step: _late(_own(step), _middle))


SLOW = (
    Mistake(
        "waits-not-late",
        "it compared communication_s, which is long for the ranks that wait",
        "a late rank has a long data_s or compute_s, and a short communication_s",
        lambda steps: _often(steps, _waiting),
    ),
    Mistake(
        "one-slow-step",
        "it named a rank for a single slow step",
        "count the steps in which a rank is late: more than half of them",
        lambda steps: sorted({r for s in steps for r in _late(_own(s), _middle)}),
    ),
    Mistake(
        "one-slow-step",
        "it averaged the seconds over the steps, so one long step decides",
        "count the steps in which a rank is late: more than half of them",
        lambda steps: _over_steps(steps, statistics.mean),
    ),
    Mistake(
        "",
        "it compared the median of each rank's seconds over the steps",
        "compare the ranks in each step, then count the steps in which a rank is late",
        lambda steps: _over_steps(steps, _middle),
    ),
    Mistake(
        "",
        "a straggler is slow in more than half of the steps",
        "count the steps in which a rank is late: more than half of them",
        lambda steps: _often(steps, lambda s: _late(_own(s), _middle), or_half=True),
    ),
    Mistake(
        "one-slow-step",
        "it looked at the last step only",
        "count the steps in which a rank is late: more than half of them",
        lambda steps: sorted(_late(_own(steps[-1]), _middle)),
    ),
    Mistake(
        "position-not-rank",
        "it named positions in the list, not ranks",
        "the rank is in the record: record.rank",
        _of_positions,
    ),
    Mistake(
        "",
        "it left out data_s",
        "a rank's own time is data_s + compute_s",
        lambda steps: _often(
            steps, lambda s: _late({r.rank: r.compute_s for r in s}, _middle)
        ),
    ),
    Mistake(
        "",
        "it compared each rank with the fastest one",
        "compare with the median of the other ranks",
        lambda steps: _often(steps, lambda s: _late(_own(s), min)),
    ),
    Mistake(
        "",
        "it compared each rank with the mean of the others",
        "compare with the median of the other ranks: one long time does not move it",
        lambda steps: _often(steps, lambda s: _late(_own(s), statistics.mean)),
    ),
    Mistake(
        "",
        "a straggler takes more than 1.5 times the median",
        "late is more than LATE times the median: >, not >=",
        lambda steps: _often(steps, lambda s: _late(_own(s), _middle, operator.ge)),
    ),
    Mistake(
        "",
        "it took the median of all ranks, not of the others",
        "compare with the median of the other ranks, without the rank's own time",
        lambda steps: _often(steps, _late_of_all),
    ),
)


def _unlike(step: Step, right: int) -> list[int]:
    return sorted(row.rank for row in step if row.checksum != right)


def _commonest(step: Step) -> int:
    sums = [row.checksum for row in step]
    return max(sums, key=sums.count)


def _votes(step: Step) -> int:
    return sum(row.checksum == _commonest(step) for row in step)


def _by_half(step: Step) -> list[int]:
    if 2 * _votes(step) < len(step):
        return sorted(row.rank for row in step)
    return _unlike(step, _commonest(step))


def _places(step: Step) -> list[int]:
    """Positions of those unlike the majority; without one, all ranks."""
    if 2 * _votes(step) <= len(step):
        return sorted(row.rank for row in step)
    right = _commonest(step)
    return [place for place, row in enumerate(step) if row.checksum != right]


UNLIKE = (
    Mistake(
        "one-rank-is-right",
        "it compared every checksum with the first record's",
        "compare with the checksum that more than half of the ranks have",
        lambda steps: _unlike(steps[0], steps[0][0].checksum),
    ),
    Mistake(
        "one-rank-is-right",
        "it compared every checksum with the lowest rank's",
        "compare with the checksum that more than half of the ranks have",
        lambda steps: _unlike(steps[0], min(steps[0]).checksum),
    ),
    Mistake(
        "no-majority",
        "without a majority, all are suspects",
        "without a majority nothing tells which replica is right: name all ranks",
        lambda steps: _unlike(steps[0], _commonest(steps[0])),
    ),
    Mistake(
        "no-majority",
        "it took half of the ranks for a majority",
        "half is no majority: more than half of the ranks must have it",
        lambda steps: _by_half(steps[0]),
    ),
    Mistake(
        "position-not-rank",
        "it named positions in the list, not ranks",
        "the rank is in the record: record.rank",
        lambda steps: _places(steps[0]),
    ),
    Mistake(
        "position-not-rank",
        "it named positions in the list, not ranks",
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


def _bad_or_without_loss(step: Step) -> list[int]:
    return sorted(r.rank for r in step if r.num_nonfinite or math.isnan(r.loss))


def _first_bad(steps: list[Step]) -> Step:
    return next((step for step in steps if _bad(step)), [])


POISONED = (
    Mistake(
        "nan-after-reduce",
        "it also named ranks that got it later, from the all_reduce",
        "look at the first step in which num_nonfinite is above 0 on some rank",
        lambda steps: _bad(steps[-1]),
    ),
    Mistake(
        "nan-after-reduce",
        "it named every rank that ever had a nan",
        "look at the first step in which num_nonfinite is above 0 on some rank",
        lambda steps: sorted({rank for step in steps for rank in _bad(step)}),
    ),
    Mistake(
        "",
        "it looked at losses that are nan, not at the gradients",
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
        "it also counted losses that are nan",
        "a rank without samples has the loss nan, and nothing is wrong there",
        lambda steps: next(filter(None, map(_bad_or_without_loss, steps)), list[int]()),
    ),
    Mistake(
        "",
        "it named only one of the ranks of that step",
        "",
        lambda steps: _bad(_first_bad(steps))[:1],
    ),
    Mistake(
        "position-not-rank",
        "it named positions in the list, not ranks",
        "the rank is in the record: record.rank",
        lambda steps: [k for k, r in enumerate(_first_bad(steps)) if r.num_nonfinite],
    ),
)
