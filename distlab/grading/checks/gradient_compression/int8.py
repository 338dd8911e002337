"""Checks of task 4.14, `gradient_compression.int8`: within the bounds of rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distlab.grading.checks.gradient_compression.hooked import (
    WORLDS,
    Gradients,
    bytes_over,
    expect_no_wait_in_call,
    expect_work,
    heard_lines,
    sums_of,
)
from distlab.grading.checks.gradient_compression.int8_mistakes import MISTAKES, guesses
from distlab.grading.checks.gradient_compression.int8_steps import (
    FACTORS,
    LOST,
    NARROW,
    NUM_SMALL,
    PEAK,
    RESIDUAL,
    SIZE,
    STEPS,
    compress,
    compress_falling,
    compress_infinite,
    compress_narrow,
    compress_scaled,
    falling,
    gradients,
    narrow,
    scale_of,
    scaled,
    wrapped,
)
from distlab.grading.clause import clause
from distlab.grading.kit.messages import expect_messages
from distlab.grading.kit.values import brief, expect_equal_bits, largest_error
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner.autopsy import Evidence

TASK = "gradient_compression.int8"
HEADER_BYTES = 16  # a scale, and whatever else is one number


def off(actual: Tensor, expected: Tensor) -> float:
    """The largest difference; inf where there is a nan."""
    if actual.shape != expected.shape:
        return float("inf")
    gap = float((actual.double() - expected).abs().max())
    return gap if gap == gap else float("inf")


def _farthest(actual: Sequence[Tensor], total: Tensor, bound: float) -> str:
    """The element of all ranks that is farthest from the sum, and that sum."""
    rank = max(range(len(actual)), key=lambda rank: off(actual[rank], total))
    who = f"rank {rank}'s bucket.flat"
    flat = actual[rank]
    if flat.shape != total.shape:
        return f"{who} has the shape {list(flat.shape)}, expected {list(total.shape)}"
    gaps = (flat.double() - total).abs().nan_to_num(nan=torch.inf)
    index = int(gaps.argmax())
    return (
        f"{who}[{index}] is {float(flat[index]):.3g} after wait(), expected "
        f"{float(total[index]):.3g} ± {bound:.2g}"
    )


def _rows(
    actual: Sequence[Tensor], total: Tensor, bound: float
) -> tuple[Evidence, ...]:
    """On each rank the element that is farthest from the ranks' sum."""
    return tuple(
        Evidence(
            rank,
            "wrong" if off(a, total) > bound else "right",
            f"{largest_error(a, total, 4)}, give or take {bound:.3g}"
            if a.shape == total.shape
            else f"shape {list(a.shape)}   expected {list(total.shape)}",
        )
        for rank, a in enumerate(actual)
    )


def _expect_sum(runs: Runs, bucket: int, step: int, names: Sequence[str]) -> None:
    n, parts = runs.world_size, gradients(runs.seed, runs.world_size)[step][bucket]
    total = torch.stack(parts).sum(0)
    scale = scale_of(parts, 127 // n)
    actual = sums_of(runs.finished(compress), step, bucket)
    bound = 1.001 * n * scale
    if all(off(a, total) <= bound for a in actual):
        return
    evidence = _rows(actual, total, bound)
    if bucket and all(bool(a.isnan().any()) for a in actual):
        told = "when a bucket is all zeros, bucket.flat is nan after wait()"
        if step:
            told = "in the step after a bucket of zeros, bucket.flat is nan"
        raise NotYetError(
            f"{told}, expected the ranks' sum",
            slug="zero-scale",
            evidence=evidence,
            rule="the scale may be 0: do not divide by it",
        )
    by_name, gaps = guesses(parts), dict[str, float]()
    for name in names:
        values = by_name[name]
        told_apart = any(off(v, total) > 2 * bound for v in values)
        gap = max(off(a, v) for a, v in zip(actual, values, strict=True))
        if told_apart and gap <= bound:
            gaps[name] = gap
    if gaps:
        mistake = MISTAKES[min(gaps, key=gaps.__getitem__)]
        raise NotYetError(
            f"in step {step + 1}, {mistake.sentence}",
            slug=mistake.slug,
            evidence=evidence,
            rule=mistake.rule,
        )
    raise NotYetError(
        f"in step {step + 1}, {_farthest(actual, total, bound)}",
        evidence=evidence,
    )


def _expect_no_nan(runs: Runs) -> None:
    for record in runs.finished(compress).ranks:
        for dtype, everywhere in record.value["nan_as"][:1]:
            of_zeros = "with a bucket of zeros, " * everywhere
            raise NotYetError(
                f"{of_zeros}rank {record.rank} converts a nan to {dtype}, which isn't "
                "defined, expected numbers only",
                slug="zero-scale" if everywhere else "",
                rule="the scale may be 0: do not divide by it" if everywhere else "",
            )


def _expect_one_scale(runs: Runs) -> None:
    """The ranks' largest elements are equal, and in different places."""
    n, parts = runs.world_size, falling(runs.seed, runs.world_size)[0][0]
    total, bound = torch.stack(parts).sum(0), 1.001 * n * scale_of(parts, 127 // n)
    actual = sums_of(runs.finished(compress_falling), 0, 0)
    if all(off(a, total) <= bound for a in actual):
        return
    scale = n * scale_of(parts, 127 // n)
    added = torch.stack([(part / scale).round() for part in parts]).sum(0) * scale
    fits = all(off(a, added) <= 1e-6 * PEAK for a in actual)
    told = "when the ranks' largest elements are equal but in different places, "
    if fits:
        told = "when the ranks' largest elements are equal, "
        told += "the scale is the sum of the ranks' scales, expected their maximum"
    raise NotYetError(
        told + ("" if fits else _farthest(actual, total, bound)),
        evidence=_rows(actual, total, bound),
        rule="one scale for all: all_reduce with ReduceOp.MAX" if fits else "",
    )


def _expect_any_size(runs: Runs) -> None:
    """Gradients of about 1e-9 and 1e8, in float32."""
    n = runs.world_size
    for bucket, (parts, factor) in enumerate(
        zip(scaled(runs.seed, n)[0], FACTORS, strict=True)
    ):
        total = torch.stack(parts).double().sum(0)
        bound = 1.01 * n * scale_of(parts, 127 // n)
        actual = sums_of(runs.finished(compress_scaled), 0, bucket)
        if all(off(a, total) <= bound for a in actual):
            continue
        gap = max(off(a, total) for a in actual)
        raise NotYetError(
            f"with float32 gradients of at most {PEAK * factor:.3g}, bucket.flat is "
            f"off by {gap:.3g} after wait(), expected at most {bound:.3g}",
            evidence=_rows(actual, total, bound),
            rule="the scale follows from the largest element, however small or large",
        )


def _expect_infinite_once(runs: Runs) -> None:
    """An inf or nan of one rank is seen by all, in its own step and in no other."""
    n, run = runs.world_size, runs.finished(compress_infinite)
    for step, of_buckets in LOST.items():
        for bucket, (value, rank) in enumerate(of_buckets):
            what = f"{'a nan' if value != value else 'an inf'} on rank {rank % n}"
            seen = [not f.isfinite().all() for f in sums_of(run, step, bucket)]
            if not all(seen):
                raise NotYetError(
                    f"with {what}, bucket.flat is finite on rank {seen.index(False)} "
                    "after wait(), expected inf or nan on all ranks",
                    slug="overflow-swallowed",
                    rule="no int8 is inf or nan: the scale tells all ranks, and MAX of "
                    "nan and a number may be the number",
                )
            after = sums_of(run, step + 1, bucket)
            if not all(bool(flat.isfinite().all()) for flat in after):
                raise NotYetError(
                    f"in the step after {what}, bucket.flat is still inf or nan, "
                    "expected finite numbers",
                    slug="residual-infinite",
                    rule="keep nothing of an inf or nan",
                )


def _expect_narrow(runs: Runs) -> None:
    """bfloat16 has no room for the digits of a scale; an overflow is C2's."""
    for what, actual, total, bound, overflown in _narrow_results(runs):
        if off(actual, total) > bound and not overflown:
            raise NotYetError(
                f"{what}, {_farthest([actual], total, bound)}",
                evidence=_rows([actual], total, bound),
            )


def _expect_own_numbers_fit(runs: Runs) -> None:
    """On one rank no level is spare: the sum is the rank's own number."""
    for what, actual, total, bound, overflown in _narrow_results(runs):
        if overflown:
            raise NotYetError(
                f"{what}, the largest number is 128, which int8 turns into -128, "
                "expected at most 127",
                slug="int8-overflow",
                evidence=_rows([actual], total, bound),
                rule="limit the numbers to +-(127 // n): in 16 bits largest / scale "
                "may round to more",
            )


class _Narrow(NamedTuple):
    what: str
    actual: Tensor
    total: Tensor
    bound: float
    overflown: bool  # all that is wrong is -128 in place of 128


def _narrow_results(runs: Runs) -> Iterator[_Narrow]:
    every = [
        (dtype, bucket, of_ranks[0])
        for dtype in NARROW
        for bucket, of_ranks in enumerate(narrow(runs.seed, dtype)[0])
    ]
    for dtype, bucket, part in every:
        total = part.double()
        actual = sums_of(runs.finished(compress_narrow, dtype=dtype), 0, bucket)[0]
        scale = scale_of([part], 127)
        bound = 1.5 * scale  # the sum is rounded to 16 bits, too
        guess = torch.where(total > 126.5 * scale, -total, total)
        # 128 scales are one more than the largest element.
        overflown = off(actual, total) > bound and off(actual, guess) <= 2.5 * scale
        largest = float(part.abs().max())
        what = f"for a {dtype} bucket with elements up to {largest:.3g}"
        yield _Narrow(what, actual, total, bound, overflown)


def _near(world_size: int) -> list[RunSpec]:
    plays = [
        on_ranks(compress),
        on_ranks(compress_falling).when("when the residual is larger than a gradient"),
        on_ranks(compress_infinite).when("with an inf or nan in a gradient"),
        on_ranks(compress_scaled).when("with very small and very large gradients"),
    ]
    alone = [
        on_ranks(compress_narrow, dtype=dtype).when(f"with a {dtype} bucket")
        for dtype in NARROW
    ]
    return [*plays, *alone * (world_size == 1)]


@clause(TASK, "C1", worlds=WORLDS, runs=_near)
def near_the_sum(runs: Runs) -> str | None:
    """Bucket 1, where at most one rank has a large element; first with zeros."""
    run = runs.finished(compress)
    expect_work(run)
    for step in (0, 1):
        names = ("own-scale", "signed-scale", "divided-twice", "own-gradient-only")
        _expect_sum(runs, 1, step, names)
        expect_equal_bits(
            sums_of(run, step, 1), what="bucket.flat after wait()", slug="own-order-sum"
        )
    _expect_no_nan(runs)
    if runs.world_size > 1:
        _expect_one_scale(runs)
    else:
        _expect_narrow(runs)
    _expect_any_size(runs)
    _expect_infinite_once(runs)
    expect_messages(run, "bucket.flat is right, but comm was not used")
    return f"n = {runs.world_size}: {127 // runs.world_size} levels"


@clause(TASK, "C2", worlds=WORLDS, runs=_near, after=("C1",), own="int8-overflow")
def no_overflow(runs: Runs) -> str | None:
    """All ranks' largest elements in one place; then a residual; then bfloat16."""
    _expect_sum(runs, 0, 0, ("int8-overflow", "fractional-levels", "levels-of-128"))
    _expect_room_for_the_residual(runs)
    if runs.world_size == 1:
        _expect_own_numbers_fit(runs)
    return None


def _expect_room_for_the_residual(runs: Runs) -> None:
    """Gradient + residual fit too; with or without the residual, this allows both."""
    n, steps = runs.world_size, falling(runs.seed, runs.world_size)
    levels = 127 // n
    before, alone = (scale_of(step[1], levels) for step in steps)
    scale = (alone * levels + before) / levels  # gradient + residual, at the most
    total = torch.stack(steps[1][1]).sum(0)
    run = runs.finished(compress_falling)
    actual = [_only_there(flat, total) for flat in sums_of(run, 1, 1)]
    bound = 1.001 * n * (before + scale)
    if all(off(a, total) <= bound for a in actual):
        return
    pairs = zip(*_second(steps), strict=True)
    corrected = [old + new for old, new in pairs]
    numbers = wrapped(sum(wrapped((c / alone).round()) for c in corrected))  # type: ignore[arg-type]
    guess = (numbers * alone)[RESIDUAL]
    fits = all(off(a[RESIDUAL], guess) <= 1.001 * n * alone for a in actual)
    raise NotYetError(
        "when the residual is larger than the gradients, "
        + (
            "the scale follows from the gradients alone, expected it to follow from "
            "gradient + residual"
            if fits
            else _farthest(actual, total, bound)
        ),
        slug="int8-overflow" if fits else "",
        evidence=_rows(actual, total, bound),
        rule="the scale is that of the largest gradient + residual" if fits else "",
    )


def _only_there(flat: Tensor, total: Tensor) -> Tensor:
    """The elements that are in the residual, beside the right ones."""
    if flat.shape != total.shape:
        return flat
    found = total.clone()
    found[RESIDUAL] = flat[RESIDUAL].to(found)
    return found


def _second(steps: Gradients) -> list[list[Tensor]]:
    """Of both steps the ranks' gradients in the second bucket."""
    return [of_buckets[1] for of_buckets in steps]


@clause(TASK, "C3", worlds=WORLDS, runs=[on_ranks(compress)], after=("C2",))
def rounding_is_made_up_for(runs: Runs) -> str | None:
    """The sum over the steps, of elements that each step alone rounds to zero."""
    n = runs.world_size
    run = runs.finished(compress)
    # The element that sets the scale may have a residual too.
    bound = 1.001 * n * scale_of(gradients(runs.seed, n)[0][0], 127 // n) * 1.1
    total = torch.zeros(SIZE, dtype=torch.float64)
    found = [torch.zeros(SIZE, dtype=torch.float64) for _ in range(n)]
    for step in range(STEPS):
        total += torch.stack(gradients(runs.seed, n)[step][0]).sum(0)
        for rank, flat in enumerate(sums_of(run, step, 0)):
            found[rank] += flat.double()
    for rank, actual in enumerate(found):
        if off(actual, total) > bound:
            _expect_own_residuals(runs)
            _lost(rank, actual, total, bound)
    kept = [value["kept"][0] for value in run.values if value["kept"]]
    left = torch.stack(kept).double().sum(0) if kept else torch.zeros(SIZE)
    if off(found[0] + left, total) > 0.02 * bound:
        is_empty = not bool(left.any())
        raise NotYetError(
            f"after {STEPS} steps, the ranks' self.residuals "
            + ("are empty" if is_empty else "add up to other values")
            + ", expected the rounding errors of all steps",
            rule="self.residuals.keep(bucket, rest), and self.residuals.of(bucket)",
        )
    return f"{STEPS} steps: off by less than one rounding"


def _summed_residuals(seed: int, n: int, steps: int) -> list[Tensor]:
    """By step the sums, if each rank subtracts the ranks' sum, not its own numbers."""
    held = [torch.zeros(SIZE, dtype=torch.float64)] * n
    sums = []
    for of_buckets in gradients(seed, n)[:steps]:
        parts = [g + h for g, h in zip(of_buckets[0], held, strict=True)]
        scale = scale_of(parts, 127 // n)
        total = torch.stack([(p / scale).round() for p in parts]).sum(0) * scale
        held = [part - total for part in parts]
        sums.append(total)
    return sums


def _expect_own_residuals(runs: Runs) -> None:
    n, steps = runs.world_size, 3
    run, guess = runs.finished(compress), _summed_residuals(runs.seed, n, steps)
    found = [sums_of(run, step, 0) for step in range(steps)]
    if n > 1 and all(
        off(a, g) <= 1e-6 * float(g.abs().max())
        for of_ranks, g in zip(found, guess, strict=True)
        for a in of_ranks
    ):
        raise NotYetError(
            "each rank subtracts the sum of all ranks' numbers from gradient + "
            "residual, expected it to subtract its own numbers only",
            slug="residual-of-the-sum",
            rule="keep the residual before comm.all_reduce(numbers), which changes "
            "them in place",
        )


def _lost(rank: int, actual: Tensor, total: Tensor, bound: float) -> None:
    at = slice(1, 1 + NUM_SMALL)
    # Without error feedback each step may be off by one rounding, and no more.
    gone = not actual[at].any() and off(actual, total) <= STEPS * bound
    raise NotYetError(
        "each step's rounding error is lost, so "
        * gone
        + f"rank {rank}'s bucket.flat, summed over {STEPS} steps, is off by "
        f"{off(actual, total):.3g}, expected at most {bound:.3g}, one step's rounding",
        slug="no-error-feedback" if gone else "",
        evidence=[
            (
                rank,
                "wrong",
                f"small elements: got {brief(actual[at])}   expected "
                f"{brief(total[at])}",
            )
        ],
        rule="keep corrected - rounded * scale, and add it in the next step"
        if gone
        else "",
    )


@clause(TASK, "C4", worlds=WORLDS, runs=[on_ranks(compress)])
def one_byte_for_each(runs: Runs) -> str | None:
    """The bytes of the collectives, by their cost."""
    n = runs.world_size
    run = runs.finished(compress)
    limit = 2 * (n - 1) / n * (SIZE + HEADER_BYTES)
    if over := bytes_over(run, STEPS, limit):
        rank, sent = over
        heard = run.values[rank]["heard"]
        wide = sorted({call[4] for call in heard if call[3] > 2 * SIZE})
        rule = f"it sends {', '.join(wide)}: all_reduce an int8 tensor"
        raise NotYetError(
            f"rank {rank} sends {sent:.0f} bytes for a bucket of {SIZE} elements"
            + f", as {' and '.join(wide)}" * bool(wide)
            + f", expected at most {limit:.0f}, as int8",
            slug="wide-sum" if wide else "",
            evidence=heard_lines(run),
            rule=rule if wide else "",
        )
    return f"n = {n}: at most {limit:.0f} bytes, dense {2 * (n - 1) / n * SIZE * 8:.0f}"


@clause(TASK, "C5", worlds=(3, 2), runs=[on_ranks(compress)])
def the_call_returns_at_once(runs: Runs) -> str | None:
    """Calls and waits between the call of the hook and its return."""
    expect_no_wait_in_call(runs.finished(compress))
    return None
