"""Other formulas than that of usual_step_s, and the rule that each of them breaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import mean, median, pstdev, stdev

from distlab.given.recovery import Report as Row

_CLOSE = 1e-6
_MEDIAN = "the median, not the mean: one long step must not move the limit"
_TOGETHER = "all ranks' durations count together, whatever rank they are of"
Number = Callable[[Sequence[float]], float]


def _gaps(rows: Iterable[Row]) -> list[tuple[float, int]]:
    """Between two reports of a rank that follow each other: seconds, and steps."""
    return [(b[1] - a[1], b[0] - a[0]) for row in rows for a, b in pairwise(row.steps)]


def _durations(rows: Iterable[Row]) -> list[float]:
    return [seconds / num for seconds, num in _gaps(rows)]


def _about(seconds: Sequence[float], middle: Number, spread: Number) -> float:
    around = middle(seconds)
    return around + spread([abs(one - around) for one in seconds])


def _usual(seconds: Sequence[float]) -> float:
    return _about(seconds, median, median)


def _plain(rows: Sequence[Row]) -> float:
    return _usual([seconds for seconds, _ in _gaps(rows)])


def _often(rows: Sequence[Row]) -> float:
    return _usual([s / num for s, num in _gaps(rows) for _ in range(num)])


def _alive(rows: Sequence[Row]) -> float:
    return _usual(_durations(r for r in rows if not r.has_ended))


def _per_rank(rows: Sequence[Row], over: Number, own: Number) -> float:
    return over([own(_durations([row])) for row in rows if len(row.steps) > 1])


def _medians(rows: Sequence[Row]) -> float:
    return _usual([median(_durations([row])) for row in rows if len(row.steps) > 1])


_SPREAD = "add the median of the distances from the median"
_MEAN, _WITH_MEAN = "it took their mean", "it started from their mean"
_SEPARATE = "it evaluated each rank by itself"
FORMULAS: tuple[tuple[str, str, Callable[[Sequence[Row]], float]], ...] = (
    ("divide by the difference of the numbers: a report may lack steps",
     "it counted a gap as one step", _plain),
    ("a gap is one duration, however many steps it has",
     "it counted a gap of two steps as two durations", _often),
    (_SPREAD, "it took their median without the jitter",
     lambda rows: median(_durations(rows))),
    (_MEDIAN, _MEAN, lambda rows: mean(_durations(rows))),
    (_MEDIAN, _WITH_MEAN, lambda rows: _about(_durations(rows), mean, mean)),
    (_MEDIAN, _WITH_MEAN, lambda rows: _about(_durations(rows), mean, median)),
    (_MEDIAN, "it added the mean distance to their median",
     lambda rows: _about(_durations(rows), median, mean)),
    (_MEDIAN, "it took their mean plus their standard deviation",
     lambda rows: mean(_durations(rows)) + stdev(_durations(rows))),
    (_MEDIAN, "it took their mean plus their standard deviation",
     lambda rows: mean(_durations(rows)) + pstdev(_durations(rows))),
    ("the durations of a rank that has ended count, too",
     "it left out the ranks that have ended", _alive),
    (_TOGETHER, "it took the usual step of the ranks' medians", _medians),
    *((_TOGETHER, _SEPARATE, lambda rows, over=over: _per_rank(rows, over, _usual))
      for over in (median, mean, max, min)),
    *((_TOGETHER, _SEPARATE, lambda rows, over=over: _per_rank(rows, over, median))
      for over in (median, mean, max, min)),
)  # fmt: skip
"""The rule that a formula breaks, what its result is, and the formula."""


def known_as(wrong: Sequence[tuple[Sequence[Row], float]]) -> tuple[str, str]:
    """The rule and the words of the formula that gives all of them, or nothing."""
    for rule, words, formula in FORMULAS:
        if all(_gives(formula, rows, told) for rows, told in wrong):
            return rule, words
    return "", ""


def _gives(
    formula: Callable[[Sequence[Row]], float], rows: Sequence[Row], told: float
) -> bool:
    try:
        return math.isclose(formula(rows), told, rel_tol=_CLOSE)
    except (ValueError, ZeroDivisionError):  # no duration to take a median of
        return False
