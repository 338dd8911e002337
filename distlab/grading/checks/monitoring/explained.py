"""C3 of 4.19, `monitoring.profile`: why communication is exposed, in one word."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from distlab.curriculum import installed_course
from distlab.given.monitoring import Span, Spans, read_spans
from distlab.grading.checks.monitoring.profile import (
    TASK,
    exposed,
    lines,
    merged,
    total,
)
from distlab.grading.clause import clause
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext

TRACES = installed_course() / "phase4_production" / "traces"
RECORDED = {"run_1": "partial", "run_2": "late", "run_3": "hidden"}
WORDS = ("hidden", "partial", "late", "blocking")


# By word: exactly 20 %, and the nearest on the other side, in quarters.
AT_LIMITS = [
    ("hidden", Spans([(0.0, 10.0)], [(0.0, 8.0)])),
    ("partial", Spans([(0.0, 10.0)], [(0.0, 7.75)])),
    ("partial", Spans([(0.0, 10.0)], [(8.0, 40.0)])),
    ("blocking", Spans([(0.0, 10.0)], [(8.25, 40.0)])),
    ("partial", Spans([(8.0, 40.0)], [(0.0, 10.0)])),
    ("late", Spans([(8.25, 40.0)], [(0.0, 10.0)])),
    ("late", Spans([(8.0, 8.5), (20.0, 60.0)], [(0.0, 10.0)])),
    ("blocking", Spans([(7.75, 8.25), (20.0, 60.0)], [(0.0, 10.0)])),
]


def backwards(seed: int) -> list[tuple[str, Spans]]:
    """A backward() of some layers for each cause, and variants of it."""
    draw = random.Random(seed + 9)
    n, layer = draw.randint(6, 10), float(draw.randint(80, 120))
    end = n * layer
    compute = [(k * layer, (k + 1) * layer) for k in range(n)]
    compute += [(k * layer + 5, (k + 1) * layer - 5) for k in range(n)]  # nested
    short = [((k + 1) * layer, (k + 1.4) * layer) for k in range(n)]
    long = [(layer + 2 * k * layer, layer + 2 * (k + 1) * layer) for k in range(n)]
    one = [(end + 10, end + 4 * layer)]
    gaps = [(2.0 * k * layer, (2 * k + 1) * layer) for k in range(n)]
    between = [((2 * k + 1) * layer, (2 * k + 2) * layer) for k in range(n)]
    both = [(end + 10, end + 4 * layer), (end + 12, end + 4 * layer - 3)]
    copies = [*compute, (end + 4 * layer, end + 4.3 * layer)]
    return [
        ("hidden", Spans(short, compute)),
        ("partial", Spans(long, compute)),
        ("late", Spans(one, compute)),
        ("blocking", Spans(between, gaps)),
        ("late", Spans(both, compute)),
        ("late", Spans(one, copies)),
        ("hidden", Spans([(0.0, end)], compute)),
        ("partial", Spans([(end / 2, end), (end / 2, 1.5 * end)], compute)),
        ("blocking", Spans([*between, *between], [*gaps, *gaps])),
        ("late", Spans([(0.95 * end, 4 * end)], compute)),
        ("partial", Spans([(0.1 * end, 9 * end)], compute)),
        ("partial", Spans([(0.7 * end, end), (end + 20, 2 * end)], compute)),
    ]


def turned(seed: int) -> list[tuple[str, Spans]]:
    """The same in another order, and compute that begins before the communication."""
    draw = random.Random(seed + 10)
    mixed = []
    for word, spans in backwards(seed):
        lanes = [draw.sample(list(lane), len(lane)) for lane in spans]
        mixed.append((word, Spans(*lanes)))
        mixed.append((word, Spans(*(sorted(lane, reverse=True) for lane in spans))))
    short = [(70.0, 75.0), (120.0, 200.0)]
    after = [(85.0, 100.0), (86.0, 99.0), (87.0, 98.0)]
    before = [(0.0, 75.0), (1.0, 74.0), (2.0, 73.0), (3.0, 72.0)]
    return [
        *mixed,
        ("blocking", Spans([(40, 50), (10, 20)], [(0, 10), (20, 30)])),
        ("blocking", Spans(short, [(0, 100)])),
        ("late", Spans([(90, 95), (120, 200)], [(0, 100)])),
        ("late", Spans([(80, 85), (200, 300)], [(0, 80), *after])),
        ("blocking", Spans([(75, 76), (200, 300)], [*before, (76, 101)])),
        *AT_LIMITS,
    ]


def all_cases(seed: int) -> list[tuple[str, Spans]]:
    """Those that the learner's function is asked about, without the recorded ones."""
    return [*backwards(seed), *turned(seed)]


class _Variant(NamedTuple):
    """A known way to get the compute that comes later wrong."""

    sentence: str
    rule: str
    after: Callable[[Spans], float]  # as a fraction of the compute


def _fraction(first: float, spans: Sequence[Span]) -> float:
    """Of the durations, merged or not, what lies after `first`."""
    left = total((max(start, first), max(end, first)) for start, end in spans)
    return left / total(spans)


def _earliest(spans: Spans) -> float:
    return min(start for start, _ in spans.communication)


VARIANTS = (
    _Variant(
        "it used the first communication in the list, not the earliest",
        "the spans come in any order: take the smallest start",
        lambda s: _fraction(s.communication[0][0], merged(s.compute)),
    ),
    _Variant(
        "it counted nested compute several times",
        "merge the compute first",
        lambda s: _fraction(_earliest(s), s.compute),
    ),
    _Variant(
        "it counted nested compute several times",
        "merge the compute first",
        lambda s: (
            _fraction(_earliest(s), s.compute)
            * total(s.compute)
            / total(merged(s.compute))
        ),
    ),
    _Variant(
        "it left out the compute span in which the communication starts",
        "of such a span the part after the start counts",
        lambda s: (
            total(c for c in merged(s.compute) if c[0] >= _earliest(s))
            / total(merged(s.compute))
        ),
    ),
    _Variant(
        "it counted all of the compute span in which the communication starts",
        "of such a span the part after the start counts",
        lambda s: (
            total(c for c in merged(s.compute) if c[1] > _earliest(s))
            / total(merged(s.compute))
        ),
    ),
)


def explain_all(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """What explain_exposed returns for those, and for the recorded traces."""
    cases = [spans for _, spans in all_cases(seed)]
    cases += [read_spans(TRACES / f"{name}.json") for name in RECORDED]
    found = []
    for place, spans in enumerate(cases, 1):
        with in_call(f"explain_exposed, case {place}"):
            told = unit.explain_exposed(list(spans.communication), list(spans.compute))
            found.append(told if isinstance(told, str) else f"{told!r:.40}")
    return found


@clause(TASK, "C3", worlds=(1,), runs=[on_ranks(explain_all)])
def the_cause(runs: Runs) -> str | None:
    """The word for each cause; then for the traces of real runs."""
    found = worked_out(runs, explain_all).values[0]
    cases = all_cases(runs.seed)
    for (word, spans), told in zip(cases, found, strict=False):
        if told != word:
            failure = _wrong_word("when", word, told, spans)
            raise _named(failure, cases, found)
    for name, told in zip(RECORDED, found[len(cases) :], strict=True):
        if told != RECORDED[name]:
            spans = read_spans(TRACES / f"{name}.json")
            raise _wrong_word(
                f"in traces/{name}.json, where", RECORDED[name], told, spans
            )
    return "and the three recorded traces"


def _wrong_word(what: str, word: str, told: str, spans: Spans) -> NotYetError:
    parts, whole = merged(spans.compute), total(merged(spans.communication))
    share = exposed(spans) / whole
    covered = (whole - exposed(spans)) / min(whole, total(parts))
    left = _fraction(_earliest(spans), parts)
    said = f'"{told}"' if told in WORDS else told
    if "hidden" in (word, told):
        decides = f"{100 * share:.3g} % of the communication is exposed"
    elif "partial" in (word, told):
        decides = (
            f"the overlap of compute and communication is {100 * covered:.3g} % of the "
            "shorter of the two"
        )
    else:
        decides = (
            f"{100 * left:.3g} % of the compute comes after the communication starts"
        )
    return NotYetError(
        f'{what} {decides}, explain_exposed returned {said}, expected "{word}"',
        evidence=lines(spans),
    )


def _named(
    failure: NotYetError, cases: Sequence[tuple[str, Spans]], found: Sequence[str]
) -> NotYetError:
    """The same, with the variant that explains the answers to all cases."""
    for variant in VARIANTS:
        if all(
            told == _word_of(word, variant.after(spans))
            for (word, spans), told in zip(cases, found, strict=False)
        ):
            return failure.but(
                message=f"{failure.message}: {variant.sentence}", rule=variant.rule
            )
    return failure


def _word_of(word: str, after: float) -> str:
    """The word, if this fraction of the compute came later."""
    return word if word in WORDS[:2] else "late" if after <= 0.2 else "blocking"
