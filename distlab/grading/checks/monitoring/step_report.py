"""Checks of 4.1, `monitoring.step_report`: clocks, shares, and means over all ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

from distlab.grading.checks.monitoring.clocks import FORWARD, WALL, WORKING, Clocks
from distlab.grading.checks.monitoring.recorded import (
    NAN,
    Row,
    Step,
    drawn_ranks,
    drawn_row,
    records,
    same,
    shown,
)
from distlab.grading.clause import clause
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY, Evidence

TASK = "monitoring.step_report"
PARTS = ("data", "compute", "communication")

# ── C1: the clock and the timer ─────────────────────────────────────────────────────

NEAR_S = 1e-5  # the time of day as a float has 7 digits after the point


def script(seed: int) -> list[tuple[str, float]]:
    """What happens between calls of the clock: the last but one sets it back."""
    draw = random.Random(seed)
    seconds = [draw.uniform(0.5, 3) for _ in range(3)]
    return [
        ("compute", seconds[0]),
        ("wait", seconds[1]),
        ("correct", -3600.0),
        ("wait", seconds[2]),
    ]


def tell_time(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """The seconds between calls of now_s, and those of the clocks beside it."""
    clocks = Clocks()
    with clocks.seen_by(unit):
        told, beside = [unit.now_s()], [dict(clocks.now)]
        for event, seconds in script(seed):
            getattr(clocks, event)(seconds)
            told.append(unit.now_s())
            beside.append(dict(clocks.now))
    return {
        "told": [number(value) for value in told],
        "beside": {k: [now[k] for now in beside] for k in (WALL, FORWARD, WORKING)},
    }


def number(value: Any) -> float | str:
    """A number as float, or what it is instead."""
    if value is None:
        return "None: is a return missing?"
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return f"{value!r:.50}, not a number"


def laps(seed: int) -> list[tuple[str, float]]:
    """Parts of a step and their seconds; data and communication come twice."""
    draw = random.Random(seed + 1)
    order = ("data", "compute", "communication", "data", "communication")
    return [(part, draw.uniform(0.1, 2)) for part in order]


def time_parts(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """The seconds of a StepTimer after two steps, on a clock of the check's."""
    now_s = [7.25]
    timer = unit.StepTimer(lambda: now_s[0])
    seconds, inside = [], 0
    for step in range(2):
        timer.reset()
        for part, lasts_s in laps(seed + step):
            now_s[0] += 10.0  # between the parts
            with in_call(f'measure("{part}")'), timer.measure(part):
                now_s[0] += lasts_s
                inside += 1
        seconds.append({part: number(timer.seconds[part]) for part in PARTS})
    return {"seconds": seconds, "inside": inside}


def _differences(values: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(values)]


def _near(actual: Sequence[float], expected: Sequence[float]) -> bool:
    pairs = zip(actual, expected, strict=True)
    return all(abs(a - e) <= NEAR_S for a, e in pairs)


@clause(TASK, "C1", worlds=(1,), runs=[on_ranks(tell_time), on_ranks(time_parts)])
def seconds_add_up(runs: Runs) -> str | None:
    """V: the clock under a script of events; then laps of the parts."""
    _expect_clock(worked_out(runs, tell_time).values[0], runs.seed)
    timed = worked_out(runs, time_parts).values[0]
    for step, found in enumerate(timed["seconds"]):
        _expect_parts(found, laps(runs.seed + step))
    return None


def _expect_clock(run: dict[str, Any], seed: int) -> None:
    wrong = next((value for value in run["told"] if isinstance(value, str)), None)
    if wrong is not None:
        raise NotYetError(f"now_s() returns {wrong}")
    told = _differences(run["told"])
    clocks = {kind: _differences(values) for kind, values in run["beside"].items()}
    if _near(told, clocks[FORWARD]):
        return
    what = {
        "compute": "the process computes for {:.2f} s",
        "wait": "the process waits for {:.2f} s",
        "correct": "the time of day is set back by 3600 s",
    }
    lines = tuple(
        Evidence(
            rank=NOBODY,
            state=f"{difference:+.2f} s",
            text="while " + what[event].format(seconds),
        )
        for (event, seconds), difference in zip(script(seed), told, strict=True)
    )
    if _near(told, clocks[WALL]):
        raise NotYetError(
            "now_s() went back by 3600 s when the time of day was corrected",
            slug="wall-clock",
            evidence=lines,
            rule="use a clock that is never set: time.perf_counter()",
        )
    if _near(told, clocks[WORKING]):
        raise NotYetError(
            "now_s() stood still while the process waited",
            slug="processor-time",
            evidence=lines,
            rule="a rank that waits for others uses no processor: time.perf_counter()",
        )
    passed = sum(clocks[FORWARD])
    raise NotYetError(
        f"now_s() advanced by {sum(told):.6g} while {passed:.2f} s passed",
        evidence=lines,
    )


def _expect_parts(found: dict[str, Any], measured: list[tuple[str, float]]) -> None:
    for part in PARTS:
        of_part = [seconds for name, seconds in measured if name == part]
        value = found[part]
        if isinstance(value, str):
            raise NotYetError(f'timer.seconds["{part}"] is {value}')
        if same(value, sum(of_part)):
            continue
        took = " and ".join(f"{seconds:.2f} s" for seconds in of_part)
        slug = rule = ""
        if len(of_part) > 1 and same(value, of_part[-1]):
            slug, rule = "last-lap-only", "add the seconds to those that are there"
        raise NotYetError(
            f'"{part}" took {took}, and timer.seconds["{part}"] is {value:.4g}',
            slug=slug,
            rule=rule,
        )


# ── C2, C3: the report ──────────────────────────────────────────────────────────────


def cases(seed: int) -> list[Step]:
    """Steps of 1 to 9 ranks: uneven samples, none, nan where it does not count."""
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
    return [*steps, _with_nan(steps[3]), [drawn_row(draw, r, 0) for r in (4, 2)]]


def _with_nan(step: Step) -> Step:
    """The same step, in which a rank with samples has the loss nan."""
    return [step[0], step[1]._replace(loss=NAN)]


def report(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """What step_report returns for each case, as plain numbers."""
    found = []
    for number_of_case, step in enumerate(cases(seed), 1):
        with in_call(f"step_report, step {number_of_case}"):
            found.append(read_report(unit.step_report(records(unit, step))))
    return found


def read_report(told: Any) -> dict[str, Any] | str:
    """Its three fields as plain numbers, or what is wrong with it."""
    if told is None:
        return "returns None: is a return missing?"
    try:
        shares = {int(r): [float(x) for x in own] for r, own in told.shares.items()}
    except (AttributeError, TypeError, ValueError):
        return f"returns {told!r:.60}: it has no shares by rank"
    loss, speed = number(told.loss), number(told.samples_per_s)
    for name, value in (("loss", loss), ("samples_per_s", speed)):
        if isinstance(value, str):
            return f"has the {name} {value}"
    return {"shares": shares, "loss": loss, "samples_per_s": speed}


def _reports(runs: Runs) -> Iterator[tuple[Step, dict[str, Any]]]:
    found = worked_out(runs, report).values[0]
    for step, told in zip(cases(runs.seed), found, strict=True):
        if isinstance(told, str):
            raise NotYetError(f"step_report {told}", evidence=shown(step))
        yield step, told


@clause(TASK, "C2", worlds=(1,), runs=[on_ranks(report)])
def shares_of_each_rank(runs: Runs) -> str | None:
    """V: three fractions for each rank, by its number."""
    for step, told in _reports(runs):
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
        f"shares has the ranks {_listed(found)}; the records are of {_listed(ranks)}",
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
    values = ", ".join(f"{value:.4g}" for value in found)
    raise NotYetError(
        f"rank {row.rank}: shares {values}; expected "
        f"{', '.join(f'{value:.4g}' for value in own)}",
        slug=slug,
        evidence=shown(step),
        rule=rule,
    )


def _is_quotient(found: Sequence[float], row: Row, seconds: float) -> bool:
    right = [part / seconds for part in row[1:4]]
    return len(found) == len(right) and all(map(same, found, right))


@clause(TASK, "C3", worlds=(1,), runs=[on_ranks(report)])
def over_all_samples(runs: Runs) -> str | None:
    """V: sums over samples, and the slowest rank's seconds."""
    told_apart = [(step, told, right_loss(step)) for step, told in _reports(runs)]
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
        "the loss is that of the first record",
        "sum over all records",
        lambda step: step[0].loss,
    ),
    _Mistake(
        "local-metrics",
        "the loss is that of the lowest rank",
        "sum over all records",
        lambda step: min(step).loss,
    ),
    _Mistake(
        "mean-of-means",
        "the loss is the mean of the ranks' means",
        "weight each loss by its number of samples",
        lambda step: _mean([row.loss for row in step if row.num_samples]),
    ),
    _Mistake(
        "mean-of-nothing",
        "the loss is nan because a rank has no samples",
        "leave out the ranks without samples: 0 × nan is nan",
        lambda step: _of_samples(step, step),
    ),
    _Mistake(
        "nan-left-out",
        "a rank with samples has the loss nan, and the report does not show it",
        "leave out a rank because it has no samples, not because its loss is nan",
        lambda step: right_loss([r for r in step if not math.isnan(r.loss)]),
    ),
    _Mistake(
        "nan-left-out",
        "a rank with samples has the loss nan, and it counts as 0",
        "leave out a rank because it has no samples, not because its loss is nan",
        lambda step: _of_samples([r for r in step if not math.isnan(r.loss)], step),
    ),
)


def _wrong_loss(
    step: Step, told: dict[str, Any], right: float, all_steps: list[Any]
) -> NotYetError:
    """The mistake that explains every step; a step without samples may be anything."""
    found = told["loss"]
    for mistake in MISTAKES:
        fits = [
            same(other["loss"], mistake.loss(s))
            for s, other, _ in all_steps
            if any(row.num_samples for row in s)
        ]
        if all(fits):
            return NotYetError(
                f"{mistake.sentence}: {found:.4g}, expected {right:.4g}",
                slug=mistake.slug,
                evidence=shown(step),
                rule=mistake.rule,
            )
    return NotYetError(
        f"the loss is {found:.4g}, expected {right:.4g}", evidence=shown(step)
    )


def _expect_speed(step: Step, found: float) -> None:
    samples = sum(row.num_samples for row in step)
    seconds = [row.step_s for row in step]
    right = samples / max(seconds)
    if same(found, right):
        return
    slug = rule = ""
    for wrong_s in (sum(seconds), _mean(seconds)):
        if same(found, samples / wrong_s):
            slug = "seconds-added-up"
            rule = "ranks work at the same time: the slowest one ends the step"
    raise NotYetError(
        f"samples_per_s is {found:.4g}; {samples} samples in {max(seconds):.2f} s are "
        f"{right:.4g}",
        slug=slug,
        evidence=shown(step),
        rule=rule,
    )
