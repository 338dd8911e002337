"""C1 of 4.1, `monitoring.step_report`: the clock, and the timer of a step's parts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

from distlab.given.monitoring import PARTS
from distlab.grading.checks.monitoring.clocks import FORWARD, WALL, WORKING, Clocks
from distlab.grading.checks.monitoring.recorded import number, same
from distlab.grading.clause import clause
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY, Evidence

TASK = "monitoring.step_report"
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
    return {"seconds": seconds, "inside": inside, "raised": _raised_in(timer)}


class _BlockError(Exception):
    """The block of measure raises it."""


def _raised_in(timer: Any) -> str:
    """What the caller of measure gets if the block raises."""
    try:
        with timer.measure("compute"):
            raise _BlockError
    except _BlockError:
        return ""
    except Exception as error:
        return type(error).__name__
    return "nothing"


def _differences(values: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise(values)]


def _near(actual: Sequence[float], expected: Sequence[float]) -> bool:
    pairs = zip(actual, expected, strict=True)
    return all(abs(a - e) <= NEAR_S for a, e in pairs)


@clause(TASK, "C1", worlds=(1,), runs=[on_ranks(tell_time), on_ranks(time_parts)])
def seconds_add_up(runs: Runs) -> str | None:
    """The clock under a script of events; then laps of the parts."""
    _expect_clock(worked_out(runs, tell_time).values[0], runs.seed)
    timed = worked_out(runs, time_parts).values[0]
    for step, found in enumerate(timed["seconds"]):
        _expect_parts(found, laps(runs.seed + step))
    if timed["raised"]:
        raise NotYetError(
            "when the block of measure() raised an error, its caller got "
            f"{timed['raised']}, expected that error",
            rule="use try and finally, without return or except: the error goes on",
        )
    return None


def _expect_clock(run: dict[str, Any], seed: int) -> None:
    wrong = next((value for value in run["told"] if isinstance(value, str)), None)
    if wrong is not None:
        raise NotYetError(f"now_s() returned {wrong}")
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
        Evidence(NOBODY, f"{difference:+.2f} s", "while " + what[event].format(seconds))
        for (event, seconds), difference in zip(script(seed), told, strict=True)
    )
    if _near(told, clocks[WALL]):
        raise NotYetError(
            "when the time of day was set back by 3600 s, now_s() went back too, "
            "expected a clock that is never set",
            slug="wall-clock",
            evidence=lines,
            rule="use a clock that is never set: time.perf_counter()",
        )
    if _near(told, clocks[WORKING]):
        raise NotYetError(
            "while the process waited, now_s() stood still, expected it to advance",
            slug="processor-time",
            evidence=lines,
            rule="a rank that waits for others uses no processor: time.perf_counter()",
        )
    passed = sum(clocks[FORWARD])
    raise NotYetError(
        f"while {passed:.2f} s passed, now_s() advanced by {sum(told):.3g}, expected "
        f"{passed:.3g}",
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
        blocks = "blocks" if len(of_part) > 1 else "a block"
        slug = rule = ""
        if len(of_part) > 1 and same(value, of_part[-1]):
            slug, rule = "last-lap-only", "add the seconds to those that are there"
        raise NotYetError(
            f'after {blocks} of {took} in measure("{part}"), timer.seconds["{part}"] '
            f"is {value:.3g}, expected {sum(of_part):.3g}",
            slug=slug,
            rule=rule,
        )
