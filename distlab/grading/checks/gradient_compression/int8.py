"""Checks of task 4.14, `gradient_compression.int8`.

Any rounding is right: an element may be off by one scale for each rank. So a mistake
must move an element by more, and the inputs are made for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.grading.checks.gradient_compression.hooked import (
    WORLDS,
    Gradients,
    expect_no_wait_in_call,
    expect_work,
    heard_lines,
    sums_of,
    take_steps,
)
from distlab.grading.clause import clause
from distlab.grading.kit.clause_order import judged_after
from distlab.grading.kit.messages import expect_messages
from distlab.grading.kit.values import brief, expect_equal_bits
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import Evidence

TASK = "gradient_compression.int8"
SIZE, STEPS, PEAK = 40, 12, 127.0
NUM_SMALL = 16
"""Elements 1 … of the first bucket: the same in each step, and rounded to zero."""
HEADER_BYTES = 16  # a scale, and whatever else is one number


@lru_cache(maxsize=32)
def gradients(seed: int, n: int) -> Gradients:
    """Bucket 0: all ranks have a large element 0. Bucket 1: one rank has; zeros first.

    The ranks' largest elements differ by factors, so that their own scales do too; in
    the first step another one is the largest on all ranks.
    """
    generator = torch.Generator().manual_seed(seed * 101 + n)

    def drawn(size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64)

    scale = PEAK / (127 // n)
    small = [(0.3 + 0.15 * drawn(NUM_SMALL)) * scale for _ in range(n)]
    found: Gradients = []
    for step in range(STEPS):
        first, second = [], []
        for rank in range(n):
            one = (2 * drawn(SIZE) - 1) * PEAK / 4
            one[0] = PEAK / (1 + 0.25 * rank)
            one[1 : 1 + NUM_SMALL] = small[rank]
            if not step:  # 127 / n levels that are not rounded down overflow here
                one[1 + NUM_SMALL] = PEAK
            first.append(one)
            other = (2 * drawn(SIZE) - 1) * (50.0 if rank == step % n else 0.1)
            second.append(other if step else torch.zeros_like(other))
        found.append([first, second])
    return found


def compress(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Steps with the class Int8 as the hook."""
    return take_steps(context, unit.Int8(), gradients(seed, context.world_size))


def scale_of(parts: Sequence[Tensor], levels: int) -> float:
    """Of the largest magnitude on any rank."""
    return max(float(part.abs().max()) for part in parts) / levels


def wrapped(numbers: Tensor) -> Tensor:
    """As int8 adds."""
    return (numbers + 128) % 256 - 128


def guesses(parts: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """What known mistakes leave on each rank in the first step."""
    n, total = len(parts), torch.stack(list(parts)).sum(0)
    shared = scale_of(parts, 127)
    overflown = wrapped(sum((part / shared).round() for part in parts))  # type: ignore[arg-type]
    own = [max(scale_of([part], 127 // n), 1e-300) for part in parts]
    summed = sum((part / s).round() for part, s in zip(parts, own, strict=True))
    return {
        "int8-overflow": [overflown * shared] * n,
        "own-scale": [summed * s for s in own],  # type: ignore[misc]
        "divided-twice": [total / n] * n,
        "own-gradient-only": list(parts),
    }


SENTENCES = {
    "int8-overflow": "a sum of the ranks' numbers does not fit into int8: it wrapped "
    "around",
    "own-scale": "each rank used its own scale: numbers of different units were added",
    "divided-twice": "bucket.flat is the mean, not the sum: DDP divides again",
    "own-gradient-only": "every rank still has its own gradient",
}
RULES = {
    "int8-overflow": "a rank's numbers may be as large as 127 // n",
    "own-scale": "all_reduce the scale with ReduceOp.MAX first",
    "divided-twice": "leave the sum in bucket.flat: DDP divides it",
}


def off(actual: Tensor, expected: Tensor) -> float:
    """The largest difference; inf where there is a nan."""
    if actual.shape != expected.shape:
        return float("inf")
    gap = float((actual.double() - expected).abs().max())
    return gap if gap == gap else float("inf")


def _expect_sum(runs: Runs, bucket: int, step: int, slugs: Sequence[str]) -> None:
    n, parts = runs.world_size, gradients(runs.seed, runs.world_size)[step][bucket]
    total = torch.stack(parts).sum(0)
    scale = scale_of(parts, 127 // n)
    actual = sums_of(runs.finished(compress), step, bucket)
    bound = 1.001 * n * scale
    if all(off(a, total) <= bound for a in actual):
        return
    evidence = tuple(
        Evidence(
            rank=rank,
            state="wrong" if off(a, total) > bound else "right",
            text=f"got {brief(a)}   expected {brief(total)}, give or take {bound:.3g}",
        )
        for rank, a in enumerate(actual)
    )
    if bucket and all(bool(a.isnan().any()) for a in actual):
        when = "in the step after it" if step else "at once"
        raise NotYetError(
            f"a bucket of zeros becomes nan, {when}",
            slug="zero-scale",
            evidence=evidence,
            rule="the scale may be 0: do not divide by it",
        )
    by_slug = guesses(parts)
    for slug in slugs:
        values = by_slug[slug]
        told_apart = any(off(v, total) > 2 * bound for v in values)
        fits = all(off(a, v) <= bound for a, v in zip(actual, values, strict=True))
        if told_apart and fits:
            raise NotYetError(
                f"step {step + 1}, bucket {bucket}: {SENTENCES[slug]}",
                slug=slug,
                evidence=evidence,
                rule=RULES.get(slug, ""),
            )
    raise NotYetError(
        f"step {step + 1}, bucket {bucket}: bucket.flat after wait() is off by more "
        f"than {bound:.3g}",
        evidence=evidence,
    )


@clause(TASK, "C1", worlds=WORLDS, runs=[on_ranks(compress)])
def near_the_sum(runs: Runs) -> str | None:
    """V: bucket 1, where at most one rank has a large element; first with zeros."""
    run = runs.finished(compress)
    expect_work(run)
    for step in (0, 1):
        slugs = ("own-scale", "divided-twice", "own-gradient-only")
        _expect_sum(runs, 1, step, slugs)
        expect_equal_bits(
            sums_of(run, step, 1), what="bucket.flat after wait()", slug="own-order-sum"
        )
    expect_messages(run, "bucket.flat is right, but comm was not used")
    return f"n = {runs.world_size}: {127 // runs.world_size} levels"


@clause(TASK, "C2", worlds=WORLDS, runs=[on_ranks(compress)])
def no_overflow(runs: Runs) -> str | None:
    """V: bucket 0, where all ranks have their largest element in the same place."""
    with judged_after(near_the_sum, runs, "C1", "int8-overflow"):
        _expect_sum(runs, 0, 0, ("int8-overflow",))
    return None


@clause(TASK, "C3", worlds=WORLDS, runs=[on_ranks(compress)])
def rounding_is_made_up_for(runs: Runs) -> str | None:
    """V: the sum over the steps, of elements that each step alone rounds to zero."""
    n = runs.world_size
    with judged_after(no_overflow, runs, "C2"):
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
                _lost(rank, actual, total, bound)
    return f"{STEPS} steps: off by less than one rounding"


def _lost(rank: int, actual: Tensor, total: Tensor, bound: float) -> None:
    at = slice(1, 1 + NUM_SMALL)
    gone = not actual[at].any()
    raise NotYetError(
        f"rank {rank}: after {STEPS} steps the sum of all buckets is off by "
        f"{off(actual, total):.3g}, expected at most {bound:.3g}",
        slug="no-error-feedback" if gone else "",
        evidence=(
            Evidence(
                rank=rank,
                state="wrong",
                text=f"small elements: got {brief(actual[at])}   expected "
                f"{brief(total[at])}",
            ),
        ),
        rule="keep corrected - rounded * scale, and add it in the next step"
        if gone
        else "",
    )


@clause(TASK, "C4", worlds=WORLDS, runs=[on_ranks(compress)])
def one_byte_for_each(runs: Runs) -> str | None:
    """B: the bytes of the collectives, by their cost."""
    n = runs.world_size
    run = runs.finished(compress)
    expect_work(run)
    limit = 2 * (n - 1) / n * (SIZE + HEADER_BYTES)
    for record in run.ranks:
        sent = record.sent_bytes / STEPS / 2
        if sent <= limit + 1e-6:
            continue
        wide = sorted({call[4] for call in record.value["heard"] if call[3] > 2 * SIZE})
        rule = f"it sends {', '.join(wide)}: all_reduce an int8 tensor"
        raise NotYetError(
            f"rank {record.rank} sends {sent:.0f} bytes for a bucket of {SIZE} elements"
            f", expected at most {limit:.0f}",
            slug="wide-sum" if wide else "",
            evidence=heard_lines(run),
            rule=rule if wide else "",
        )
    return f"n = {n}: at most {limit:.0f} bytes, dense {2 * (n - 1) / n * SIZE * 8:.0f}"


@clause(TASK, "C5", worlds=(3, 2), runs=[on_ranks(compress)])
def the_call_returns_at_once(runs: Runs) -> str | None:
    """O: calls and waits between the call of the hook and its return."""
    run = runs.finished(compress)
    expect_work(run)
    expect_no_wait_in_call(run)
    return None
