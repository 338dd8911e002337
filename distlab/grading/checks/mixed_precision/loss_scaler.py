"""Checks of task 2.7, `mixed_precision.loss_scaler`: unscaled once, skipped together.

Each clause goes by the scale that the rank had in that step, so that a wrong staircase
(C3) does not spoil the gradients (C1) or the decisions (C2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distlab.grading.checks.mixed_precision.loss_scaler_runs import (
    BEHIND,
    HUGE,
    HUGE_AT,
    KINDS,
    NARROW,
    NO_GRADIENT_AT,
    SLOPES,
    STEPS,
    TWICE_AT,
    TWO_STEPS,
    TWO_WHEN,
    halved,
    raw_gradient,
    scaled_steps,
)
from distlab.grading.clause import clause
from distlab.grading.kit.messages import expect_messages
from distlab.grading.kit.values import brief, close
from distlab.grading.kit.when_raised import finished
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import Run
from distlab.terminal import ranks_in_words

WORLDS = (3, 2, 4, 5, 1)
CALM = 4  # steps before the first overflow
LOOSE = 1e-6
STALE = "last-steps-answer"
RULE_STALE = "update ends the step: empty self.overflow there"


# ── C1: gradients ───────────────────────────────────────────────────────────────────


@clause(
    "mixed_precision.loss_scaler", "C1", worlds=WORLDS, runs=[on_ranks(scaled_steps)]
)
def unscaled_once(runs: Runs) -> str | None:
    """After the step the gradients are what float16 left, over the scale."""
    run = finished(runs, scaled_steps, KINDS)
    n = runs.world_size
    for step in range(CALM):
        for rank in range(n):
            record = run.values[rank][step]
            raw = raw_gradient(runs.seed, step, rank, n)
            if not halved(raw, record["scale"]).isfinite().all():
                continue  # the scale is wrong: see C3
            _expect_scaled(record, raw, rank)
            for when in ("early", "again", "after"):
                if step in _PLAYED[when]:
                    _expect_not_remembered(run, runs.seed, rank)
                    _expect_unscaled(record, when, raw, rank)
    for rank, told in enumerate(run.values):
        _expect_each_unscaled(told[-1]["two"]["grads"][0], rank)
        _expect_in_float16(told[-1]["narrow"], rank)
        _expect_behind_an_inf(told[-1]["behind"], rank)
    return None


def _expect_scaled(record: dict[str, Any], raw: Tensor, rank: int) -> None:
    """What backward() made of the scaled loss."""
    scale, came = record["scale"], record["came"]
    rule = "return the loss times the scale; do not detach it"
    if came is None:
        raise NotYetError(
            "after backward() of what scale returned, the weights have no gradient: "
            "expected the loss times the scale, with its graph",
            rule=rule,
            fatal=True,
        )
    if not close(came, halved(raw, scale), LOOSE):
        vanished = bool((came[raw < 1e-6] == 0).all())
        raise NotYetError(
            f"with scale {scale:g}, small gradients still became 0 in float16 on rank "
            f"{rank}, expected backward() on loss * scale"
            if vanished
            else f"with scale {scale:g}, backward() computed {brief(came, 3)} on rank "
            f"{rank}, expected {brief(halved(raw, scale), 3)}",
            slug="gradients-underflow" if vanished else "",
            rule=rule,
            fatal=True,
        )


def _expect_not_remembered(run: Run, seed: int, rank: int) -> None:
    """Divided in the first step and in no later one: that was taken for done."""
    scales = [record["scale"] for record in run.values[rank]]
    divided = raw_gradient(seed, 0, rank, run.world_size)
    divided = halved(divided, scales[0]) / scales[0]
    later = [_undivided(run, seed, step, rank) for step in range(1, CALM)]
    if all(later) and _same(run.values[rank][0]["after"], divided):
        raise NotYetError(
            "the gradients are divided by the scale in step 1 only: in step 2 they are "
            f"still {scales[1]:g} times too large",
            slug=STALE,
            rule=RULE_STALE,
        )


def _undivided(run: Run, seed: int, step: int, rank: int) -> bool:
    """Whether the gradients of this step are what backward() left."""
    record = run.values[rank][step]
    scaled = halved(raw_gradient(seed, step, rank, run.world_size), record["scale"])
    whens = ("early", "after") if step % 2 == 0 else ("after",)
    return all(_same(record[when], scaled) for when in whens)


def _same(found: Tensor | None, values: Tensor) -> bool:
    # Relative: after two divisions all that is left is small.
    return found is not None and torch.allclose(found, values, rtol=LOOSE, atol=0.0)


def _expect_each_unscaled(found: list[Tensor | None], rank: int) -> None:
    """Two optimizers, one step: the gradients of both are divided, once each."""
    for number, (gradient, slope) in enumerate(zip(found, SLOPES, strict=True)):
        if close(gradient, torch.full((2,), slope), LOOSE):
            continue
        got = "None" if gradient is None else f"{float(gradient[0]):.3g}"
        which = "second" if number else "first"
        raise NotYetError(
            f"with two optimizers in one step and scale 8, the {which} one's gradient "
            f"is {got} on rank {rank}, expected {slope:g}",
            slug="per-scaler-state",
            rule="remember for each optimizer whether its gradients were divided",
        )


def _expect_in_float16(found: Tensor, rank: int) -> None:
    gradient, scale = NARROW
    if not close(found, torch.full((2,), gradient / scale), LOOSE):
        raise NotYetError(
            f"for a float16 gradient of {gradient:g} and scale {scale:g}, unscale_ "
            f"gives {float(found[0]):g} on rank {rank}, expected {gradient / scale:g}",
            rule="a float16 tensor holds no number above 65504: divide by a Python "
            "float",
        )


def _expect_behind_an_inf(found: float, rank: int) -> None:
    gradient, scale = BEHIND
    if found != gradient / scale:
        does = f"turns a gradient of {gradient:g} into {found:.3g}"
        if found == gradient:
            does = f"leaves a later gradient at {gradient:g}"
        raise NotYetError(
            f"when an earlier gradient has an inf, unscale_ with scale {scale:g} "
            f"{does} on rank {rank}, expected {gradient / scale:g}",
            rule="look at every gradient, and divide every one",
        )


_PLAYED = {"early": range(0, STEPS, 2), "again": [TWICE_AT], "after": range(STEPS)}
_WHEN = {
    "early": "after unscale_",
    "again": "after a second unscale_ in the same step",
    "after": "after scaler.step",
}


def _expect_unscaled(record: dict[str, Any], when: str, raw: Tensor, rank: int) -> None:
    scale, found = record["scale"], record[when]
    scaled = halved(raw, scale)
    if close(found, scaled / scale, LOOSE):
        return
    what = _WHEN[when]
    known = (
        ("never-unscaled", scaled, f"still {scale:g} times too large"),
        (
            "unscaled-twice",
            scaled / scale**2,
            f"divided by the scale ({scale:g}) twice, expected once",
        ),
        (
            "",
            scaled * scale,
            f"multiplied by the scale ({scale:g}) a second time, expected them divided "
            "by it",
        ),
    )
    slug = ""
    got = "None" if found is None else brief(found, 3)
    right = brief(scaled / scale, 3)
    sentence = f"{what}, the gradients are {got} on rank {rank}, expected {right}"
    for name, values, words in known:
        if _same(found, values):
            slug, sentence = name, f"{what}, the gradients are {words}"
    raise NotYetError(
        sentence,
        slug=slug,
        evidence=[
            (rank, "wrong", f"got {brief(found)}   expected {brief(scaled / scale)}")
        ],
        rule="divide .grad by the scale once per step, in place, whether or not "
        "unscale_ was called before step",
    )


# ── C2: the decision ────────────────────────────────────────────────────────────────


@clause(
    "mixed_precision.loss_scaler", "C2", worlds=WORLDS, runs=[on_ranks(scaled_steps)]
)
def all_or_none_step(runs: Runs) -> str | None:
    """Whichever rank overflows, in each step all ranks do the same."""
    run = finished(runs, scaled_steps, KINDS)
    n, seed = runs.world_size, runs.seed
    took = [[record["steps"] for record in rank] for rank in run.values]
    flags = [_own_overflows(run, seed, step) for step in range(STEPS)]
    expected = [0 if any(f) else 1 for f in flags]
    for step in range(STEPS):
        now = [rank[step] for rank in took]
        if now != [expected[step]] * n:
            raise _wrong_decision(run, seed, flags, step)
    for rank in range(n):
        for step, record in enumerate(run.values[rank]):
            if record["said"] is not bool(expected[step]):
                done = "was taken" if expected[step] else "was skipped"
                raise NotYetError(
                    f"step {step + 1} {done}, but scaler.step returned "
                    f"{record['said']}, expected {bool(expected[step])}",
                    rule="return whether the optimizer stepped: a schedule that "
                    "counts steps must not count a skipped one",
                )
    for rank, told in enumerate(run.values):
        if (steps := told[-1]["two"]["steps"]) != TWO_STEPS:
            number, own, right = next(
                (number, *pair)
                for number, pair in enumerate(zip(steps, TWO_STEPS, strict=True))
                if pair[0] != pair[1]
            )
            raise NotYetError(
                f"{TWO_WHEN[number]}, the first stepped {own[0]} and the second "
                f"{own[1]} times on rank {rank}, expected {right[0]} and {right[1]}",
                slug="per-scaler-state",
                rule="an optimizer is skipped for its own gradients only",
            )
    expect_messages(run, "all ranks decide alike, but not through comm")
    skipped = expected.count(0)
    return f"n = {n}: {skipped} of {STEPS} steps skipped, by all ranks together"


def _own_overflows(run: Run, seed: int, step: int) -> list[bool]:
    """Which ranks' own gradients overflowed, with the scale that each had."""
    found = []
    for rank in range(run.world_size):
        raw = raw_gradient(seed, step, rank, run.world_size)
        scaled = halved(raw, run.values[rank][step]["scale"])
        has_none = step == NO_GRADIENT_AT and rank == 0
        found.append(not has_none and not bool(scaled.isfinite().all()))
    return found


def _wrong_decision(
    run: Run, seed: int, flags: list[list[bool]], step: int
) -> NotYetError:
    n, now = run.world_size, [rank[step]["steps"] for rank in run.values]
    culprits = [rank for rank, overflow in enumerate(flags[step]) if overflow]
    whose = "its" if len(culprits) == 1 else "their"
    names = ranks_in_words(culprits) if culprits else "no rank"
    who = f"{names} had inf or nan in {whose} gradients"
    slug, stepped = "", next((r for r, count in enumerate(now) if count), 0)
    sentence = (
        f"in step {step + 1}, {who}, but rank {stepped} stepped, expected no rank to "
        "step"
    )
    rule = (
        "one all_reduce tells every rank whether any gradient on any rank is inf or "
        "nan; then all ranks decide alike"
    )
    if not culprits and not any(now) and step == HUGE_AT:
        slug = "finite-taken-for-inf"
        sentence = (
            f"every rank skipped step {step + 1}, where all gradients are finite and "
            f"the largest is {HUGE:g}, expected every rank to step"
        )
        rule = "look at each element: the sum of finite numbers can be inf"
    elif not culprits and _stale(run, seed, step):
        slug, rule = STALE, RULE_STALE
        sentence = (
            f"after skipping step {step}, the ranks also skipped step {step + 1}, "
            "where no gradient is inf or nan, expected a step"
        )
    elif not culprits:
        odd = next(rank for rank, count in enumerate(now) if count != 1)
        sentence = (
            f"in step {step + 1}, where no gradient is inf or nan, rank {odd} stepped "
            f"{now[odd]} times, expected once"
        )
    elif all(now):
        slug = "overflow-applied"
        sentence = (
            f"in step {step + 1}, {who}, but every rank stepped, expected no rank to "
            "step"
        )
    elif all(bool(s) != f for s, f in zip(now, flags[step], strict=True)) and n > 1:
        slug = "skips-alone"
        alone = "only this rank" if len(culprits) == 1 else "only these ranks"
        sentence = (
            f"in step {step + 1}, {who} and {alone} skipped, expected all ranks to skip"
        )
    text = ["stepped" if count else "skipped" for count in now]
    return NotYetError(
        sentence,
        slug=slug,
        evidence=[
            (rank, text[rank], "inf or nan" if flags[step][rank] else "all finite")
            for rank in range(n)
        ],
        rule=rule,
    )


def _stale(run: Run, seed: int, step: int) -> bool:
    """Whether all ranks skip as in the step before, and have left the gradients be."""
    skipped = step > 0 and not any(
        r["steps"] for rank in run.values for r in rank[step - 1 :][:2]
    )
    return skipped and all(
        _undivided(run, seed, step, rank) for rank in range(run.world_size)
    )
