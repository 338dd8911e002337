"""Checks of task 2.7, C3: the scale after every step, on resuming too."""

from __future__ import annotations

from typing import Any

from distlab.grading.checks.mixed_precision.loss_scaler import WORLDS
from distlab.grading.checks.mixed_precision.loss_scaler_runs import (
    GROWTH_INTERVAL,
    OTHER,
    STEPS,
    TWO_SCALES,
    any_rank,
    own_rank,
    scaled_steps,
    scales,
)
from distlab.grading.clause import clause
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner.autopsy import Evidence

RESUME_WORLD = 2


def _resumed(world_size: int) -> list[RunSpec]:
    again = [on_ranks(scaled_steps, resume=True)] if world_size == RESUME_WORLD else []
    return [on_ranks(scaled_steps), *again]


@clause("mixed_precision.loss_scaler", "C3", worlds=WORLDS, runs=_resumed)
def same_staircase(runs: Runs) -> str | None:
    """Torch's scale after every step, on every rank, also on resuming."""
    run = runs.finished(scaled_steps)
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
            ", then ".join(f"{scale:g}" for scale in own) for own in (below, _BELOW)
        ]
        factors = ", ".join(f"{name} {value:g}" for name, value in OTHER.items())
        raise NotYetError(
            f"a scale of 1 became {told[0]} after an overflow and a good step, "
            f"expected {told[1]} with {factors}",
        )
    if (two := run.values[0][-1]["two"]["scales"]) != TWO_SCALES:
        raise NotYetError(
            "with two optimizers, of which the first has inf in step 2 and the second "
            f"in step 3, the scale is {two}, expected {TWO_SCALES}",
            rule="an overflow of any optimizer of the step lowers the scale",
        )
    if (sooner := run.values[0][-1]["sooner"]) != 2.0:
        raise NotYetError(
            "after 3 good steps growth_interval became 3, and after the next one the "
            f"scale is {sooner:g} times what it was, expected 2 times",
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
            "after load_state_dict the scale differs from the uninterrupted run"
            + (": the count of good steps was reset" if forgot else ""),
            evidence=_stairs(found, expected),
            rule="state_dict stores loss_scale and good_steps: count in good_steps",
        )


def _wrong_staircase(
    seed: int, found: list[list[float]], expected: list[list[float]]
) -> NotYetError:
    n = len(found)
    slug, sentence = "", "the scale is not the expected one"
    for name, how, words in _KNOWN:
        if found == scales(seed, n, **how) != expected:
            slug, sentence = name, words
            break
    else:
        step = next(
            s
            for s in range(STEPS)
            if any(f[s] != e[s] for f, e in zip(found, expected, strict=True))
        )
        sentence = f"after step {step + 1} {sentence}"
    return NotYetError(
        sentence,
        slug=slug,
        evidence=_stairs(found, expected),
        rule="all ranks use the same flag; an overflow lowers the scale and "
        "resets the count; growth_interval good steps in a row raise the scale",
    )


_BELOW = [
    OTHER["backoff_factor"],
    OTHER["backoff_factor"] * OTHER["growth_factor"],
]

_KNOWN: tuple[tuple[str, dict[str, Any], str], ...] = (
    (
        "own-scale-per-rank",
        {"decide": own_rank},
        "the ranks skip together, but each changes its scale after local gradients",
    ),
    (
        "streak-not-reset",
        {"resets": False},
        "an overflow does not reset the count of good steps: the scale grows too soon",
    ),
    ("", {"growth": 1.0}, "the scale never grows"),
    ("", {"backoff": 1.0}, "the scale is not lowered after an overflow"),
    ("", {"backoff": 0.5, "growth": 0.5}, "the scale shrinks where it should grow"),
    ("", {"backoff": 2.0}, "the scale grows after an overflow"),
    ("", {"interval": 1}, "the scale grows in every step without an overflow"),
    (
        "",
        {"interval": GROWTH_INTERVAL + 1},
        "the scale grows one step late: after growth_interval + 1 good steps",
    ),
    (
        "",
        {"interval": GROWTH_INTERVAL - 1},
        "the scale grows one step early: after growth_interval - 1 good steps",
    ),
    (
        "",
        {"again": False},
        "after growing, the scale grows again in the next step: no reset of the count",
    ),
    (
        "",
        {"decide": lambda flags, rank: not any_rank(flags, rank)},
        "growth and backoff are swapped",
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
