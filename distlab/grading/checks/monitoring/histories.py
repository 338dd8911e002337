"""Steps that ranks recorded, with a fault in them: drawn for 4.2.

In each step the collective ends for all ranks together, so a rank communicates for as
long as it waits for the last one, and a little longer. Seconds lie far from the limit:
other ranks are at most 1.2 times as slow as one another, a slow one 2.5 to 4 times.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from distlab.grading.checks.monitoring.recorded import (
    BITS,
    NAN,
    Row,
    Step,
    drawn_ranks,
)

SENDING_S = 0.05


class History(NamedTuple):
    """Steps, what is special about them, and the right answer.

    `what` stands first in a verdict: "when one of 5 ranks is slow".
    """

    what: str
    steps: list[Step]
    ranks: list[int]


def _step(
    draw: random.Random,
    ranks: Sequence[int],
    factors: dict[int, float],
    *,
    part: str = "compute",
    empty: Sequence[int] = (),
    scale: float = 1.0,
) -> Step:
    """One step; `factors` of the ranks that are slow, in this part."""
    own = {}
    for rank in ranks:
        data_s, compute_s = draw.uniform(0.01, 0.02), draw.uniform(0.2, 0.22)
        slow_s = (factors.get(rank, 1.0) - 1) * (data_s + compute_s)
        if rank in empty:
            data_s, compute_s = 0.001, 0.002
        seconds = [data_s, compute_s]
        seconds[part == "compute"] += slow_s
        own[rank] = [scale * second for second in seconds]
    last_s = max(map(sum, own.values()))
    rows = []
    for rank in draw.sample(list(ranks), len(ranks)):
        num = 0 if rank in empty else draw.randint(1, 8)
        loss = draw.uniform(0.5, 4) if num else NAN
        wait_s = last_s - sum(own[rank]) + draw.uniform(SENDING_S, 1.1 * SENDING_S)
        data_s, compute_s = own[rank]
        rows.append(Row(rank, data_s, compute_s, wait_s, loss, num, 0, 77))
    return rows


def slow_ones(seed: int) -> list[History]:
    """Histories with stragglers, and some that only look so."""
    draw = random.Random(seed)

    def steady(
        what: str, n: int, slow: dict[int, float], num: int = 6, **how: object
    ) -> History:
        """`slow` maps places among the ranks to factors, in every step."""
        ranks = drawn_ranks(draw, n)
        factors = {ranks[place]: factor for place, factor in slow.items()}
        how["empty"] = [ranks[place] for place in how.pop("empty", ())]  # type: ignore[attr-defined]
        steps = [_step(draw, ranks, factors, **how) for _ in range(num)]  # type: ignore[arg-type]
        return History(what, steps, sorted(factors))

    def at_times(
        what: str, n: int, times: Sequence[int], num: int, long: Sequence[int] = ()
    ) -> History:
        """The rank at place 1 is slow in these steps only; some are long for all."""
        ranks = drawn_ranks(draw, n)
        steps = [
            _step(
                draw,
                ranks,
                {ranks[1]: 3.0} if k in times else {},
                scale=4.0 if k in long else 1.0,
            )
            for k in range(num)
        ]
        return History(what, steps, [ranks[1]] if 2 * len(times) > num else [])

    pause = steady("when a rank stops for a minute in one of 7 steps", 4, {}, num=7)
    one = pause.steps[3]
    one[2] = one[2]._replace(compute_s=60.0)
    pause.steps[3] = [
        row._replace(communication_s=60.0) if k != 2 else row
        for k, row in enumerate(one)
    ]
    long = steady("when 3 of 5 steps are long for all ranks", 4, {}, num=5)
    for k in (1, 2, 4):
        ranks = [row.rank for row in long.steps[k]]
        long.steps[k] = _step(draw, ranks, {}, scale=4.0)
    return [
        steady("when one of 5 ranks is slow", 5, {3: 2.5}),
        steady("when one of 5 ranks waits for its data", 5, {1: 3.0}, part="data"),
        steady("when one of 2 ranks is slow", 2, {0: 2.5}),
        steady("when none of 4 ranks is slow", 4, {}),
        steady("with a single rank", 1, {}),
        pause,
        at_times("when a rank is slow in 4 of 7 steps", 4, (0, 1, 3, 5), 7),
        at_times(
            "when a rank is slow in 4 of 7 steps, also in the last", 4, (1, 4, 5, 6), 7
        ),
        at_times("when a rank is slow in 3 of 7 steps", 4, (0, 3, 6), 7),
        long,
        steady("when two of 6 ranks are slow", 6, {0: 3.0, 4: 2.5}),
        steady(
            "when one of 7 ranks is slow and two have no samples",
            7,
            {2: 3.0},
            empty=(0, 5),
        ),
        steady(
            "when one of 4 ranks has no samples and none is slow", 4, {}, empty=(1,)
        ),
        steady("when one of 64 ranks is slow", 64, {37: 2.5}, num=5),
        at_times("when a rank is slow in 3 of 6 steps", 4, (1, 2, 5), 6),
        at_times(
            "when a rank is slow in 4 of 7 steps, of which some are long for all",
            4,
            (0, 1, 2, 3),
            7,
            (1, 2, 4, 6),
        ),
        _at_the_limit(draw),
        *_BY_HAND,
    ]


def _at_the_limit(draw: random.Random) -> History:
    """A rank whose own time is 1.5 times the others', exactly, in each step."""
    ranks = drawn_ranks(draw, 4)
    rows = [Row(rank, 0.25, 0.75, 0.625, 1.0, 4, 0, 77) for rank in ranks]
    rows[2] = rows[2]._replace(compute_s=1.25, communication_s=0.125)
    return History(
        "when a rank takes exactly 1.5 times as long as the others", [rows] * 3, []
    )


def _of_own_times(what: str, own_s: dict[int, float], *late: int) -> History:
    """Three equal steps, in which the ranks compute for so long."""
    rows = [Row(r, 0.0, s, 4.0 - s, 1.0, 4, 0, 77) for r, s in own_s.items()]
    return History(what, [rows] * 3, [*late])


_BY_HAND = [
    _of_own_times(
        "when two of 4 ranks are slow, and one of them far slower",
        {10: 1.0, 3: 2.0, 5: 1.0, 7: 3.5},
        3,
        7,
    ),
    _of_own_times(
        "when a rank takes just over 1.5 times as long as the others",
        {7: 1.0, 2: 1.5078125, 5: 1.0, 9: 1.0},
        2,
    ),
    _of_own_times(
        "when rank 2 takes 3.25 s and the others take 1, 1, 3 and 3 s",
        {10: 1.0, 2: 3.25, 4: 1.0, 6: 3.0, 8: 3.0},
        2,
    ),
    _of_own_times(
        "when ranks 10 and 2 are slow",
        {10: 2.0, 9: 1.0, 8: 1.0, 7: 1.0, 6: 1.0, 2: 2.0},
        2,
        10,
    ),
]


def replicas(seed: int) -> list[History]:
    """One step each, with checksums that agree or do not."""
    draw = random.Random(seed + 2)
    found = []
    for pattern, unlike, what in (
        ("aaaba", "b", "when one of 5 checksums differs from the others"),
        ("baaaa", "b", "when the first of 5 checksums differs from the others"),
        ("aaaa", "", "when all 4 checksums agree"),
        ("aabb", "ab", "when two ranks have one checksum and two have another"),
        ("ab", "ab", "when two ranks have different checksums"),
        ("aabcd", "abcd", "when only 2 of 5 checksums agree"),
        ("abc", "abc", "when no two of 3 checksums agree"),
        ("a", "", "with a single rank"),
        ("abacaa", "bc", "when 4 of 6 checksums agree"),
        ("baabaaa", "b", "when 5 of 7 checksums agree"),
    ):
        sums = dict(zip("abcd", _neighbors(draw), strict=True))
        ranks = drawn_ranks(draw, len(pattern))
        step = _step(draw, ranks, {})
        step = [
            row._replace(checksum=sums[letter])
            for row, letter in zip(step, pattern, strict=True)
        ]
        wrong = [row.rank for row, p in zip(step, pattern, strict=True) if p in unlike]
        found.append(History(what, [step], sorted(wrong)))
    numbers = {10: 5, 9: 7, 2: 6, 1: 7, 0: 7}
    rows = [Row(r, 0.0, 1.0, 0.5, 1.0, 4, 0, number) for r, number in numbers.items()]
    found.append(
        History("when 2 of 5 checksums differ from the others", [rows], [2, 10])
    )
    all_unlike = [row._replace(checksum=row.rank) for row in rows]
    all_ranks = sorted(numbers)
    found.append(History("when no two of 5 checksums agree", [all_unlike], all_ranks))
    return found


def _neighbors(draw: random.Random) -> list[int]:
    """Four checksums that are equal as float32."""
    return draw.sample(range(2**BITS - 100, 2**BITS), 4)


def poisoned(seed: int) -> list[History]:
    """Steps in which one rank's gradients have a nan, and then every rank's."""
    draw = random.Random(seed + 3)

    def history(what: str, n: int, first: int | None, num_origins: int = 1) -> History:
        ranks = drawn_ranks(draw, n)
        origins = draw.sample(ranks, num_origins) if first is not None else []
        empty = next((r for r in ranks if r not in origins), None)
        steps = []
        for k in range(6):
            step = _step(draw, ranks, {}, empty=[empty] if empty is not None else [])
            counts = dict.fromkeys(ranks, 0)
            if first is not None and k == first:
                counts |= dict.fromkeys(origins, 2)
            elif first is not None and k > first:  # by now every rank has more
                counts = {rank: 4000 if rank in origins else 4810 for rank in ranks}
                step = [row._replace(loss=NAN) for row in step]
            steps.append([row._replace(num_nonfinite=counts[row.rank]) for row in step])
        return History(what, steps, sorted(origins))

    return [
        history("when a nan appears on one of 5 ranks in step 3", 5, 2),
        history("when a nan appears in the last step", 4, 5),
        history("when a nan appears in the first step", 4, 0),
        history("when a nan appears on two of 6 ranks at once", 6, 3, 2),
        history("when no rank has a nan", 4, None),
        history("when a nan appears on a single rank", 1, 1),
        _nan_on(10, 2),
    ]


def _nan_on(*origins: int) -> History:
    """In the second step; the records are in descending order of their ranks."""
    steps = [
        [Row(r, 0.0, 1.0, 0.5, 1.0, 4, (r in origins) * k, 77) for r in (11, 10, 2, 1)]
        for k in range(3)
    ]
    return History(
        "when a nan appears on two of 4 ranks at once", steps, sorted(origins)
    )
