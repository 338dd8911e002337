"""Checks of task 2.7, C3: the scale after every step, on resuming too."""

from __future__ import annotations

from typing import Any

from distlab.grading.checks.mixed_precision.loss_scaler import WORLDS
from distlab.grading.checks.mixed_precision.loss_scaler_runs import (
    GROWTH_INTERVAL,
    KINDS,
    OTHER,
    RESUME_AT,
    STEPS,
    TWO_SCALES,
    TWO_WHEN,
    any_rank,
    own_rank,
    scaled_steps,
    scales,
)
from distlab.grading.clause import clause
from distlab.grading.kit.when_raised import finished
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner.autopsy import Evidence

RESUME_WORLD = 2


def _resumed(world_size: int) -> list[RunSpec]:
    again = on_ranks(scaled_steps, resume=True).when(
        f"with a second scaler that loads the state_dict before step {RESUME_AT + 1}"
    )
    return [on_ranks(scaled_steps), *[again] * (world_size == RESUME_WORLD)]


@clause("mixed_precision.loss_scaler", "C3", worlds=WORLDS, runs=_resumed)
def same_staircase(runs: Runs) -> str | None:
    """Torch's scale after every step, on every rank, also on resuming."""
    run = finished(runs, scaled_steps, KINDS)
    n, seed = runs.world_size, runs.seed
    took = [[record["steps"] for record in rank] for rank in run.values]
    if any(rank != took[0] for rank in took) or not any(0 in rank for rank in took):
        raise NotJudgedError("the ranks do not skip together: see C2")
    expected = scales(seed, n)
    found = [[record["next"] for record in rank] for rank in run.values]
    if found != expected:
        raise _wrong_staircase(seed, found, expected)
    below = run.values[0][-1]["below"]
    if below != _BELOW:
        told = [
            " and then ".join(f"{scale:g}" for scale in own) for own in (below, _BELOW)
        ]
        raise NotYetError(
            f"with backoff_factor {OTHER['backoff_factor']:g} and growth_factor "
            f"{OTHER['growth_factor']:g}, an overflow and a good step changed a scale "
            f"of 1 to {told[0]}, expected {told[1]}",
        )
    if (two := run.values[0][-1]["two"]["scales"]) != TWO_SCALES:
        number, own, right = next(
            (number, *pair)
            for number, pair in enumerate(zip(two, TWO_SCALES, strict=True))
            if pair[0] != pair[1]
        )
        raise NotYetError(
            f"{TWO_WHEN[number]}, the scale after the step is {own:g}, expected "
            f"{right:g}",
            rule="an overflow of any optimizer of the step lowers the scale",
        )
    if (sooner := run.values[0][-1]["sooner"]) != 2.0:
        raise NotYetError(
            "when growth_interval is lowered to 3 after 3 good steps, the next good "
            f"step leaves the scale at {sooner:g}, expected 2",
            rule="the count may be past growth_interval: compare with >=",
        )
    if n == RESUME_WORLD:
        _expect_resumed(runs, expected)
    stairs = [s for s, was in zip(found[0], [0.0, *found[0]], strict=False) if s != was]
    return f"n = {n}: the scale goes " + ", ".join(f"{s:g}" for s in stairs)


def _expect_resumed(runs: Runs, expected: list[list[float]]) -> None:
    run = runs.finished(scaled_steps, resume=True)
    found = [[record["next"] for record in rank] for rank in run.values]
    if found != expected:
        forgot = found == scales(runs.seed, runs.world_size, forgets=True)
        raise NotYetError(
            "after load_state_dict, the count of good steps began at 0, expected it to "
            "continue as in an uninterrupted run"
            if forgot
            else f"with a load_state_dict before step {RESUME_AT + 1}, "
            f"{_first_wrong(found, expected)} as in an uninterrupted run",
            evidence=_stairs(found, expected),
            rule="state_dict stores loss_scale and good_steps: count in good_steps",
        )


def _wrong_staircase(
    seed: int, found: list[list[float]], expected: list[list[float]]
) -> NotYetError:
    n = len(found)
    slug, sentence = "", _first_wrong(found, expected)
    for name, how, words in _KNOWN:
        if found == scales(seed, n, **how) != expected:
            slug, sentence = name, words
            break
    return NotYetError(
        sentence,
        slug=slug,
        evidence=_stairs(found, expected),
        rule="all ranks use the same flag; an overflow lowers the scale and "
        "resets the count; growth_interval good steps in a row raise the scale",
    )


def _first_wrong(found: list[list[float]], expected: list[list[float]]) -> str:
    step, rank = next(
        (step, rank)
        for step in range(STEPS)
        for rank in range(len(found))
        if found[rank][step] != expected[rank][step]
    )
    return (
        f"after step {step + 1} the scale is {found[rank][step]:g} on rank {rank}, "
        f"expected {expected[rank][step]:g}"
    )


_BELOW = [
    OTHER["backoff_factor"],
    OTHER["backoff_factor"] * OTHER["growth_factor"],
]

_KNOWN: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "own-scale-per-rank",
        {"decide": own_rank},
        "the ranks skip together, but each lowers its scale for its own overflows "
        "only, expected the same scale everywhere",
    ),
    (
        "streak-not-reset",
        {"resets": False},
        "an overflow doesn't reset the count of good steps, expected the count to "
        "restart at 0",
    ),
    (
        "",
        {"growth": 1.0},
        "the scale never grows, expected growth after growth_interval good steps",
    ),
    (
        "",
        {"backoff": 1.0},
        "the scale stays the same after an overflow, expected it times backoff_factor",
    ),
    (
        "",
        {"backoff": 0.5, "growth": 0.5},
        "after growth_interval good steps the scale shrinks, expected it to grow",
    ),
    (
        "",
        {"backoff": 2.0},
        "the scale grows after an overflow, expected it to shrink",
    ),
    (
        "",
        {"interval": 1},
        "the scale grows after every good step, expected it to grow after "
        "growth_interval of them",
    ),
    (
        "",
        {"interval": GROWTH_INTERVAL + 1},
        "the scale grows after growth_interval + 1 good steps, expected it after "
        "growth_interval",
    ),
    (
        "",
        {"interval": GROWTH_INTERVAL - 1},
        "the scale grows after growth_interval - 1 good steps, expected it after "
        "growth_interval",
    ),
    (
        "",
        {"again": False},
        "after growing, the scale grows again in the next step, expected the count of "
        "good steps to restart",
    ),
    (
        "",
        {"decide": lambda flags, rank: not any_rank(flags, rank)},
        "good steps lower the scale and overflows count as good steps, expected the "
        "opposite",
    ),
)


def _stairs(
    found: list[list[float]], expected: list[list[float]]
) -> tuple[Evidence, ...]:
    """Each rank's scales, around the first one that is wrong anywhere."""
    step = next(
        (
            s
            for s in range(STEPS)
            if any(f[s] != e[s] for f, e in zip(found, expected, strict=True))
        ),
        0,
    )
    first = max(0, step - 2)
    part = slice(first, step + 3)
    return tuple(
        Evidence(
            rank,
            "as expected" if f == e else "wrong",
            f"from step {first + 1} on {_text(f[part])}, expected {_text(e[part])}"
            if f != e
            else f"from step {first + 1} on {_text(f[part])}",
        )
        for rank, (f, e) in enumerate(zip(found, expected, strict=True))
    )


def _text(numbers: list[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)
