"""C2, C3 of 4.1, `monitoring.step_report`: shares, and means over all ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from distlab.grading.checks.monitoring.recorded import (
    NAN,
    Row,
    Step,
    drawn_ranks,
    drawn_row,
    number,
    records,
    same,
    shown,
)
from distlab.grading.clause import clause
from distlab.grading.kit.apart import apart
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext

TASK = "monitoring.step_report"
NO_SAMPLES = "when no rank has samples"


def cases(seed: int) -> list[Step]:
    """Steps of 1 to 9 ranks: uneven samples, nan where it does not count."""
    draw = random.Random(seed)
    counts = [(3, 1, 0), (0, 2, 5, 4), (6,), (1, 7), (0, 0, 9), (8, 8, 8)]
    counts.append((3, *(draw.choice((0, 1, 2, 13)) for _ in range(8))))
    steps = [
        [
            drawn_row(draw, rank, num)
            for rank, num in zip(drawn_ranks(draw, len(nums)), nums, strict=True)
        ]
        for nums in counts
    ]
    return [*steps, _with_nan(steps[3]), _SLOWEST_IDLE, _WAITS_LONGEST]


_SLOWEST_IDLE = [
    Row(12, 0.25, 0.5, 0.25, 2.0, 4),
    Row(3, 0.5, 2.5, 1.0, NAN, 0),
    Row(1, 0.25, 0.25, 0.5, 1.0, 12),
]
"""The slowest rank has no samples; ranks 12, 3 and 1 are in another order as text."""
_WAITS_LONGEST = [
    Row(2, 0.25, 1.25, 0.5, 2.0, 4),
    Row(0, 0.0, 0.5, 2.5, 1.0, 4),
    Row(11, 0.5, 1.25, 0.25, 3.0, 8),
]
"""The step time of the rank that computes least is the longest."""


def _with_nan(step: Step) -> Step:
    """The same step, in which a rank with samples has the loss nan."""
    return [step[0], step[1]._replace(loss=NAN)]


def idle(seed: int) -> Step:
    """A step in which no rank has samples."""
    draw = random.Random(seed + 11)
    return [drawn_row(draw, rank, 0) for rank in (4, 2)]


def report(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """What step_report returns for each case, as plain numbers."""
    found = []
    for step in cases(seed):
        samples = ", ".join(str(row.num_samples) for row in step)
        with in_call(f"step_report of ranks with {samples} samples"):
            found.append(read_report(unit.step_report(records(unit, step))))
    return found


def report_idle(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """What step_report returns for the step without samples."""
    with in_call("step_report"):
        return [read_report(unit.step_report(records(unit, idle(seed))))]


def read_report(told: Any) -> dict[str, Any] | str:
    """Its three fields as plain numbers, or what is wrong with it."""
    if told is None:
        return "returned None: is a return missing?"
    try:
        shares = {int(r): [float(x) for x in own] for r, own in told.shares.items()}
    except (AttributeError, TypeError, ValueError):
        return f"returned {told!r:.60}: it has no shares by rank"
    loss, speed = number(told.loss), number(told.samples_per_s)
    for name, value in (("loss", loss), ("samples_per_s", speed)):
        if isinstance(value, str):
            return f"returned the {name} {value}"
    return {"shares": shares, "loss": loss, "samples_per_s": speed}


def _reports(runs: Runs, *, of_idle: bool) -> Iterator[tuple[Step, dict[str, Any]]]:
    steps, found = cases(runs.seed), worked_out(runs, report).values[0]
    if of_idle:
        steps = [*steps, idle(runs.seed)]
        found = [*found, *_of_idle(runs)]
    for step, told in zip(steps, found, strict=True):
        if isinstance(told, str):
            raise NotYetError(f"step_report {told}", evidence=shown(step))
        yield step, told


def _of_idle(runs: Runs) -> list[Any]:
    try:
        told: list[Any] = worked_out(runs, report_idle).values[0]
    except NotYetError as failure:
        raise failure.but(evidence=shown(idle(runs.seed))) from failure
    return told


@clause(
    TASK,
    "C2",
    worlds=(1,),
    runs=[on_ranks(report), on_ranks(report_idle).when(NO_SAMPLES)],
)
def shares_of_each_rank(runs: Runs) -> str | None:
    """Three fractions for each rank, by its number."""
    # If it raises where no rank has samples, that is said of the loss: C3.
    of_idle = runs.ended(report_idle).outcome == "finished"
    for step, told in _reports(runs, of_idle=of_idle):
        ranks = [row.rank for row in step]
        if set(told["shares"]) != set(ranks):
            _wrong_ranks(step, list(told["shares"]))
        for row in step:
            _expect_shares(step, row, told["shares"])
    return None


def _wrong_ranks(step: Step, found: list[int]) -> None:
    ranks = [row.rank for row in step]
    numbered = sorted(found) == list(range(len(step)))
    raise NotYetError(
        f"for records of ranks {_listed(ranks)}, step_report returned shares of ranks "
        f"{_listed(found)}, expected those of the records",
        slug="position-not-rank" if numbered else "",
        evidence=shown(step),
        rule="the rank is in the record: record.rank" if numbered else "",
    )


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(ranks))) or "none"


def _expect_shares(step: Step, row: Row, shares: dict[int, list[float]]) -> None:
    own = [seconds / row.step_s for seconds in row[1:4]]
    found = shares[row.rank]
    if len(found) == len(own) and all(map(same, found, own)):
        return
    every = sum(r.step_s for r in step)
    slug = rule = ""
    if _is_quotient(found, row, every) and len(step) > 1:
        slug, rule = "share-of-all-ranks", "divide by the seconds of this rank's step"
    values = ", ".join(f"{value:.3g}" for value in found)
    right = ", ".join(f"{value:.3g}" for value in own)
    seconds = "the seconds of all ranks" if slug else "its step"
    raise NotYetError(
        f"step_report gives rank {row.rank} the shares {values} of {seconds}, "
        f"expected {right}" + " of its own step" * bool(slug),
        slug=slug,
        evidence=shown(step),
        rule=rule,
    )


def _is_quotient(found: Sequence[float], row: Row, seconds: float) -> bool:
    right = [part / seconds for part in row[1:4]]
    return len(found) == len(right) and all(map(same, found, right))


@clause(
    TASK,
    "C3",
    worlds=(1,),
    runs=[on_ranks(report), on_ranks(report_idle).when(NO_SAMPLES)],
)
def over_all_samples(runs: Runs) -> str | None:
    """Sums over samples, and the slowest rank's seconds."""
    found = _reports(runs, of_idle=True)
    told_apart = [(step, told, right_loss(step)) for step, told in found]
    wrong = [c for c in told_apart if not same(c[1]["loss"], c[2])]
    if wrong:
        raise _wrong_loss(*wrong[0], told_apart)
    for step, told, _ in told_apart:
        _expect_speed(step, told["samples_per_s"])
    return None


def right_loss(step: Step) -> float:
    """The mean over the samples of all ranks."""
    return _of_samples([row for row in step if row.num_samples], step)


def _of_samples(counted: Step, step: Step) -> float:
    """The losses of `counted` over the samples of `step`."""
    samples = sum(row.num_samples for row in step)
    total = sum(row.loss * row.num_samples for row in counted)
    return total / samples if samples else NAN


class _Mistake(NamedTuple):
    slug: str
    sentence: str
    rule: str
    loss: Any  # of a step


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else NAN


MISTAKES = (
    _Mistake(
        "local-metrics",
        "the report's loss is the first record's, {}",
        "sum over all records",
        lambda step: step[0].loss,
    ),
    _Mistake(
        "local-metrics",
        "the report's loss is the lowest rank's, {}",
        "sum over all records",
        lambda step: min(step).loss,
    ),
    _Mistake(
        "mean-of-means",
        "the report's loss is the mean of the ranks' means, {}",
        "weight each loss by its number of samples",
        lambda step: _mean([row.loss for row in step if row.num_samples]),
    ),
    _Mistake(
        "mean-of-nothing",
        "when a rank has no samples, the report's loss is {}",
        "leave out the ranks without samples: 0 × nan is nan",
        lambda step: _of_samples(step, step),
    ),
    _Mistake(
        "nan-left-out",
        "when the loss of a rank with samples is nan, the report's loss is {}",
        "leave out a rank because it has no samples, not because its loss is nan",
        lambda step: right_loss([r for r in step if not math.isnan(r.loss)]),
    ),
    _Mistake(
        "nan-left-out",
        "when the loss of a rank with samples is nan, the report counts that loss as 0 "
        "and gives {}",
        "leave out a rank because it has no samples, not because its loss is nan",
        lambda step: _of_samples([r for r in step if not math.isnan(r.loss)], step),
    ),
)


def _wrong_loss(
    step: Step, told: dict[str, Any], right: float, all_steps: list[Any]
) -> NotYetError:
    """The mistake that explains every step; a step without samples may be anything."""
    found = told["loss"]
    wanted = "nan" if math.isnan(right) else f"the mean over all samples, {right:.3g}"
    for mistake in MISTAKES:
        fits = [
            same(other["loss"], mistake.loss(s))
            for s, other, _ in all_steps
            if any(row.num_samples for row in s)
        ]
        if all(fits):
            return NotYetError(
                f"{mistake.sentence.format(f'{found:.3g}')}, expected {wanted}",
                slug=mistake.slug,
                evidence=shown(step),
                rule=mistake.rule,
            )
    return NotYetError(
        f"the report's loss is {found:.4g}, expected {wanted}", evidence=shown(step)
    )


def _expect_speed(step: Step, found: float) -> None:
    samples = sum(row.num_samples for row in step)
    seconds = [row.step_s for row in step]
    right = samples / max(seconds)
    if same(found, right):
        return
    slug = rule = more = ""
    together = "ranks work at the same time: the slowest one ends the step"
    for wrong_s, of in ((sum(seconds), "sum"), (_mean(seconds), "mean")):
        if same(found, samples / wrong_s):
            slug, rule = "seconds-added-up", together
            more = f": it divided by the {of} of the ranks' seconds"
    if same(found, sum(row.num_samples / row.step_s for row in step)):
        if sum(row.num_samples > 0 for row in step) > 1:
            more = ": it added up the throughputs of the ranks"
        rule = together
    pair = apart(found, right)
    raise NotYetError(
        f"for {samples} samples in a step that takes the slowest rank "
        f"{max(seconds):.2f} s, samples_per_s is {pair[0]}, expected {pair[1]}{more}",
        slug=slug,
        evidence=shown(step),
        rule=rule,
    )
