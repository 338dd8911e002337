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
    """Steps, what is special about them, and the right answer."""

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

    pause = steady("one rank stops for a minute in one of 7 steps", 4, {}, num=7)
    one = pause.steps[3]
    one[2] = one[2]._replace(compute_s=60.0)
    pause.steps[3] = [
        row._replace(communication_s=60.0) if k != 2 else row
        for k, row in enumerate(one)
    ]
    long = steady("all ranks have a long step", 4, {}, num=5)
    for k in (1, 2, 4):
        ranks = [row.rank for row in long.steps[k]]
        long.steps[k] = _step(draw, ranks, {}, scale=4.0)
    return [
        steady("a slow rank of 5", 5, {3: 2.5}),
        steady("a rank of 5 that waits for its data", 5, {1: 3.0}, part="data"),
        steady("a slow rank of 2", 2, {0: 2.5}),
        steady("no slow rank of 4", 4, {}),
        steady("one rank", 1, {}),
        pause,
        at_times("slow in 4 of 7 steps", 4, (0, 1, 3, 5), 7),
        at_times("slow in the last steps, 4 of 7", 4, (1, 4, 5, 6), 7),
        at_times("slow in 3 of 7 steps", 4, (0, 3, 6), 7),
        long,
        steady("two slow ranks of 6", 6, {0: 3.0, 4: 2.5}),
        steady("two ranks of 7 without samples, one slow", 7, {2: 3.0}, empty=(0, 5)),
        steady("one rank of 4 without samples, none slow", 4, {}, empty=(1,)),
        steady("a slow rank of 64", 64, {37: 2.5}, num=5),
        at_times("slow in 3 of 6 steps", 4, (1, 2, 5), 6),
        at_times(
            "slow in 4 of 7 steps, some long for all", 4, (0, 1, 2, 3), 7, (1, 2, 4, 6)
        ),
        _at_the_limit(draw),
        *_BY_HAND,
    ]


def _at_the_limit(draw: random.Random) -> History:
    """A rank whose own time is 1.5 times the others', exactly, in each step."""
    ranks = drawn_ranks(draw, 4)
    rows = [Row(rank, 0.25, 0.75, 0.625, 1.0, 4, 0, 77) for rank in ranks]
    rows[2] = rows[2]._replace(compute_s=1.25, communication_s=0.125)
    return History("own time 1.5 times the others', not more", [rows] * 3, [])


def _of_own_times(what: str, own_s: dict[int, float], *late: int) -> History:
    """Three equal steps, in which the ranks compute for so long."""
    rows = [Row(r, 0.0, s, 4.0 - s, 1.0, 4, 0, 77) for r, s in own_s.items()]
    return History(what, [rows] * 3, [*late])


_BY_HAND = [
    _of_own_times(
        "two slow ranks of 4, and one of them is far slower",
        {10: 1.0, 3: 2.0, 5: 1.0, 7: 3.5},
        3,
        7,
    ),
    _of_own_times(
        "own time just above 1.5 times the others'",
        {7: 1.0, 2: 1.5078125, 5: 1.0, 9: 1.0},
        2,
    ),
    _of_own_times(
        "the median of the others lies between 1 and 3 s, and it takes 3.25 s",
        {10: 1.0, 2: 3.25, 4: 1.0, 6: 3.0, 8: 3.0},
        2,
    ),
    _of_own_times(
        "slow ranks 10 and 2, in descending order",
        {10: 2.0, 9: 1.0, 8: 1.0, 7: 1.0, 6: 1.0, 2: 2.0},
        2,
        10,
    ),
]


def replicas(seed: int) -> list[History]:
    """One step each, with checksums that agree or do not."""
    draw = random.Random(seed + 2)
    found = []
    for pattern, unlike in (
        ("aaaba", "b"),
        ("baaaa", "b"),
        ("aaaa", ""),
        ("aabb", "ab"),
        ("ab", "ab"),
        ("aabcd", "abcd"),
        ("abc", "abc"),
        ("a", ""),
        ("abacaa", "bc"),
        ("baabaaa", "b"),
    ):
        sums = dict(zip("abcd", _neighbors(draw), strict=True))
        ranks = drawn_ranks(draw, len(pattern))
        step = _step(draw, ranks, {})
        step = [
            row._replace(checksum=sums[letter])
            for row, letter in zip(step, pattern, strict=True)
        ]
        wrong = [row.rank for row, p in zip(step, pattern, strict=True) if p in unlike]
        found.append(History(f"checksums {' '.join(pattern)}", [step], sorted(wrong)))
    numbers = {10: 5, 9: 7, 2: 6, 1: 7, 0: 7}
    rows = [Row(r, 0.0, 1.0, 0.5, 1.0, 4, 0, number) for r, number in numbers.items()]
    found.append(History("ranks 10 and 2 differ, in descending order", [rows], [2, 10]))
    all_unlike = [row._replace(checksum=row.rank) for row in rows]
    all_ranks = sorted(numbers)
    found.append(History("no two ranks agree, 10 to 0", [all_unlike], all_ranks))
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
        history("a nan on one of 5 ranks in step 3", 5, 2),
        history("a nan in the last step", 4, 5),
        history("a nan in the first step", 4, 0),
        history("a nan on two of 6 ranks in the same step", 6, 3, 2),
        history("no nan", 4, None),
        history("one rank, a nan in step 2", 1, 1),
        _nan_on(10, 2),
    ]


def _nan_on(*origins: int) -> History:
    """In the second step; the records are in descending order of their ranks."""
    steps = [
        [Row(r, 0.0, 1.0, 0.5, 1.0, 4, (r in origins) * k, 77) for r in (11, 10, 2, 1)]
        for k in range(3)
    ]
    return History("a nan on ranks 10 and 2 in the same step", steps, sorted(origins))
