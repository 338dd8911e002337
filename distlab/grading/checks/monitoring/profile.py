"""C1, C2 of 4.19, `monitoring.profile`: merged spans, and what is exposed of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

from distlab.given.monitoring import Span, Spans
from distlab.grading.checks.monitoring.recorded import number, same
from distlab.grading.clause import clause
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY, Evidence

TASK = "monitoring.profile"
_SHOWN = 8

# ── the right answers ───────────────────────────────────────────────────────────────


def merged(spans: Iterable[Span]) -> list[Span]:
    """Spans that neither overlap nor touch; none is empty."""
    result: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def total(spans: Iterable[Span]) -> float:
    """The sum of the durations, overlapping or not."""
    return sum(end - start for start, end in spans)


def exposed(spans: Spans) -> float:
    """Communication without compute."""
    both = merged([*spans.communication, *spans.compute])
    return total(both) - total(merged(spans.compute))


def shared(one: Iterable[Span], other: Sequence[Span]) -> float:
    """The time that each pair has in common; what several pairs share counts again."""
    return sum(
        max(0.0, min(end, stop) - max(start, begin))
        for start, end in one
        for begin, stop in other
    )


# ── C1 ──────────────────────────────────────────────────────────────────────────────


def sets_of_spans(seed: int) -> list[list[Span]]:
    """Nested, touching, equal, apart, in any order; some are drawn."""
    draw = random.Random(seed)
    drawn = []
    for count in (6, 12, 30):
        starts = [float(draw.randint(0, 100)) for _ in range(count)]
        drawn.append([(start, start + draw.randint(0, 12)) for start in starts])
    return [
        [(0, 4), (6, 9), (3, 5), (7, 8)],
        [],
        [(5, 7)],
        [(10, 20), (11, 12), (13, 14), (19, 25)],
        [(0, 10), (2, 3), (8, 9), (11, 12)],
        [(4, 6), (0, 2), (2, 3), (4, 6)],
        *drawn,
    ]


def merge_all(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """What merge returns for each set."""
    found = []
    for spans in sets_of_spans(seed):
        with in_call(f"merge({spans})"):
            found.append(_read_spans(unit.merge(span for span in spans)))
    return found


def _read_spans(told: Any) -> list[Span] | str:
    if told is None:
        return "returned None: is a return missing?"
    try:
        return [(float(start), float(end)) for start, end in told]
    except (TypeError, ValueError):
        return f"returned {told!r:.60}, expected a list of (start, end)"


@clause(TASK, "C1", worlds=(1,), runs=[on_ranks(merge_all)])
def the_same_time(runs: Runs) -> str | None:
    """Every moment once, in ascending order; touching spans may stay apart."""
    found = worked_out(runs, merge_all).values[0]
    for spans, told in zip(sets_of_spans(runs.seed), found, strict=True):
        call = f"merge({_spans(spans)})"
        if isinstance(told, str):
            raise NotYetError(f"{call} {told}")
        pairs = pairwise(told)
        apart = all(one[1] <= other[0] for one, other in pairs)
        if apart and merged(told) == merged(spans):
            continue
        slug = rule = ""
        if told == _as_if_never_nested(spans):
            slug = "nested-span-shortens"
            rule = "the end of a merged span is the later one of both ends"
        raise NotYetError(
            f"{call} returned {_spans(told)}, expected {_spans(merged(spans))}",
            slug=slug,
            rule=rule,
        )
    return None


def _as_if_never_nested(spans: list[Span]) -> list[Span]:
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], end
        else:
            result.append((start, end))
    return result


def _spans(spans: Sequence[Span]) -> str:
    shown = ", ".join(f"({start:g}, {end:g})" for start, end in spans[:_SHOWN])
    return f"[{shown}{', …' * (len(spans) > _SHOWN)}]"


# ── C2 ──────────────────────────────────────────────────────────────────────────────


def lanes(seed: int) -> list[Spans]:
    """Communication and compute of a rank: by hand, then drawn, with nested compute."""
    draw = random.Random(seed + 5)
    drawn = []
    for _ in range(4):
        spans = []
        for most in (30, 8):
            starts = [float(draw.randint(0, 120)) for _ in range(9)]
            spans.append([(s, s + draw.randint(1, most)) for s in starts])
        inner = [(start + 1, end - 1) for start, end in spans[1] if end - start > 2]
        drawn.append(Spans(spans[0], [*spans[1], *inner]))
    return [
        Spans([(2, 6), (4, 9)], [(0, 3), (5, 7)]),
        Spans([(10, 14)], [(0, 5), (5, 9)]),
        Spans([(1, 4)], [(0, 9), (2, 3)]),
        Spans([], [(0, 4)]),
        Spans([(3, 8), (3, 8)], []),
        Spans([(5, 25), (10, 12)], [(0, 10), (2, 8), (20, 30), (21, 29)]),
        *drawn,
    ]


def measure_all(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """What exposed_us returns for each pair of lanes, then of iterators over them."""
    found = []
    cases = lanes(seed)
    for place, spans in enumerate(cases, 1):
        with in_call(f"exposed_us, case {place}"):
            found.append(number(unit.exposed_us(*spans)))
    with in_call("exposed_us, with iterators instead of lists"):
        found += [number(unit.exposed_us(*map(iter, spans))) for spans in cases]
    return found


class _Mistake(NamedTuple):
    slug: str
    sentence: str
    rule: str
    us: Callable[[Spans], float]


MISTAKES = (
    _Mistake(
        "counted-twice",
        "it counted time shared by several spans more than once",
        "merge communication and compute first",
        lambda s: total(s.communication) - shared(s.communication, s.compute),
    ),
    _Mistake(
        "counted-twice",
        "it counted overlapping communication twice",
        "merge the communication first",
        lambda s: total(s.communication) - shared(s.communication, merged(s.compute)),
    ),
    _Mistake(
        "counted-twice",
        "it subtracted nested compute twice",
        "merge the compute first",
        lambda s: (
            total(merged(s.communication)) - shared(merged(s.communication), s.compute)
        ),
    ),
    _Mistake(
        "counted-twice",
        "it subtracted nested compute twice",
        "merge the compute first",
        lambda s: total(merged([*s.communication, *s.compute])) - total(s.compute),
    ),
    _Mistake(
        "hidden-not-exposed",
        "it returned the part that compute covers",
        "exposed is the communication that no compute covers",
        lambda s: total(merged(s.communication)) - exposed(s),
    ),
    _Mistake(
        "total-not-exposed",
        "it returned all of the communication",
        "subtract the time in which the rank also computes",
        lambda s: total(merged(s.communication)),
    ),
    _Mistake(
        "total-not-exposed",
        "it returned the sum of all communication spans",
        "merge it, and subtract the time in which the rank also computes",
        lambda s: total(s.communication),
    ),
    _Mistake(
        "totals-subtracted",
        "it subtracted the total compute from the total communication",
        "what matters is when they run, not how long each of them takes",
        lambda s: max(0.0, total(merged(s.communication)) - total(merged(s.compute))),
    ),
    _Mistake(
        "totals-subtracted",
        "it subtracted the total compute from the total communication",
        "what matters is when they run, not how long each of them takes",
        lambda s: total(merged(s.communication)) - total(merged(s.compute)),
    ),
)


@clause(TASK, "C2", worlds=(1,), runs=[on_ranks(measure_all)])
def communication_alone(runs: Runs) -> str | None:
    """Interval arithmetic; a mistake is named if it explains every case."""
    found = worked_out(runs, measure_all).values[0]
    cases = lanes(runs.seed)
    found, iterated = found[: len(cases)], found[len(cases) :]
    for told in found:
        if isinstance(told, str):
            raise NotYetError(f"exposed_us returned {told}")
    answers = zip(cases, found, strict=True)
    wrong = [(spans, told) for spans, told in answers if not same(told, exposed(spans))]
    for spans, told in sorted(wrong, key=lambda pair: sum(map(len, pair[0])))[:1]:
        fits = (
            m
            for m in MISTAKES
            if all(
                not isinstance(t, str) and same(t, m.us(s))
                for s, t in zip(cases, found, strict=True)
            )
        )
        mistake = next(fits, None)
        raise NotYetError(
            f"{_given(spans)}exposed_us returned {told:g}, expected "
            f"{exposed(spans):g}" + (f": {mistake.sentence}" if mistake else ""),
            slug=mistake.slug if mistake else "",
            evidence=lines(spans),
            rule=mistake.rule if mistake else "",
        )
    for spans, told, right in zip(cases, iterated, found, strict=True):
        if isinstance(told, str) or not same(told, right):
            got = told if isinstance(told, str) else f"{told:g}"
            raise NotYetError(
                f"{_given(spans)}given as two iterators, exposed_us returned {got}, "
                f"expected {right:g}, as for two lists",
                rule="an iterator can be read only once",
            )
    return None


def _given(spans: Spans) -> str:
    """The spans of both lanes, if they are few."""
    if sum(map(len, spans)) > 6:
        return ""
    words = [
        f"{lane} {_spans(sorted(own))}"
        if (own := getattr(spans, lane))
        else f"no {lane}"
        for lane in Spans._fields
    ]
    return f"for {' and '.join(words)}, "


def lines(spans: Spans) -> tuple[Evidence, ...]:
    """Both lanes, as far as they fit."""
    return tuple(
        Evidence(NOBODY, lane, _spans(sorted(getattr(spans, lane))))
        for lane in Spans._fields
    )
