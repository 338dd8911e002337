"""Checks of task 4.15, `gradient_compression.powersgd`.

The first Q is given, so the parent can work out what every step leaves: any way to make
columns orthonormal has the same P Qᵀ.
"""

from __future__ import annotations

from functools import lru_cache, partial
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.given.gradient_compression import first_factor
from distlab.grading.checks.gradient_compression.hooked import (
    NUM_BUCKETS,
    SHAPES,
    STEPS,
    WORLDS,
    Gradients,
    Mistake,
    bytes_over,
    expect_no_wait_in_call,
    expect_work,
    heard_lines,
    sums_of,
    take_steps,
)
from distlab.grading.checks.gradient_compression.matrices import (
    compress_several,
    narrow_dtype,
)
from distlab.grading.checks.gradient_compression.several import (
    expect_factors_only,
    expect_kept,
    expect_low_rank,
    expect_one_wait,
    expect_others,
)
from distlab.grading.clause import clause, judged_after
from distlab.grading.kit.messages import expect_messages
from distlab.grading.kit.values import (
    Suspect,
    brief,
    close,
    expect_equal_bits,
    expect_values,
)
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY

TASK = "gradient_compression.powersgd"
RANK = 2
ROWS, COLUMNS = SHAPES[0]
MATRIX = ROWS * COLUMNS
OTHERS = sum(torch.Size(shape).numel() for shape in SHAPES[1:])
NEAR = 1e-7


@lru_cache(maxsize=32)
def gradients(seed: int, n: int) -> Gradients:
    """Bucket 0: in the first step all matrices have the same two columns as a basis."""
    generator = torch.Generator().manual_seed(seed * 101 + n)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    found: Gradients = []
    for step in range(STEPS):
        basis = drawn(ROWS, RANK)
        first, second = [], []
        for _ in range(n):
            low = basis @ drawn(RANK, COLUMNS)
            matrix = low if step == 0 else drawn(ROWS, COLUMNS)
            first.append(torch.cat([matrix.reshape(-1), drawn(OTHERS)]))
            second.append(drawn(MATRIX + OTHERS))
        found.append([first, second])
    return found


def compress(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Steps with the class PowerSGD as the hook."""
    return take_steps(context, unit.PowerSGD(RANK), gradients(seed, context.world_size))


def _plays(world_size: int) -> list[RunSpec]:
    narrow = narrow_dtype(world_size)
    several = [
        on_ranks(compress_several).when("with buckets of no, one or several matrices"),
        on_ranks(compress_several, dtype=narrow).when(f"with {narrow} buckets"),
    ]
    return [on_ranks(compress), *several]


@lru_cache(maxsize=64)
def expected(seed: int, n: int, mistake: str = "") -> list[list[list[Tensor]]]:
    """By step, bucket and rank what is in the bucket."""
    zeros = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    start = first_factor(zeros, RANK)
    held = [[zeros] * n for _ in range(NUM_BUCKETS)]
    factor = [[start] * n for _ in range(NUM_BUCKETS)]
    found: list[list[list[Tensor]]] = []
    for of_buckets in gradients(seed, n):
        found.append([])
        for bucket, ranks in enumerate(of_buckets):
            own = [flat[:MATRIX].view(ROWS, COLUMNS) for flat in ranks]
            parts = [m + h for m, h in zip(own, held[bucket], strict=True)]
            p = torch.stack(
                [m @ f for m, f in zip(parts, factor[bucket], strict=True)]
            ).sum(0)
            if mistake != "not-orthonormal":
                p = torch.linalg.qr(p).Q
            qs = [m.T @ p for m in parts]
            q = torch.stack(qs).sum(0)
            sums = [p @ q.T] * n
            if mistake == "factor-not-summed":
                sums = [p @ one.T for one in qs]
            if mistake != "no-error-feedback":
                share = 1 if mistake == "sum-subtracted" else n
                held[bucket] = [m - s / share for m, s in zip(parts, sums, strict=True)]
            if mistake != "factor-forgotten":
                factor[bucket] = qs if mistake == "own-factor-kept" else [q] * n
            others = torch.stack([flat[MATRIX:] for flat in ranks]).sum(0)
            found[-1].append([torch.cat([s.reshape(-1), others]) for s in sums])
    return found


MISTAKES = (
    Mistake(
        "not-orthonormal",
        "the columns of P are not orthonormal, expected orthonormal columns",
        "torch.linalg.qr(P).Q, after the all_reduce",
    ),
    Mistake(
        "factor-not-summed",
        "every rank used its own Q in P Qᵀ, expected the sum of the ranks' Q",
        "all_reduce Q as well",
    ),
    Mistake(
        "no-error-feedback",
        "the residual of earlier steps is lost, expected each rank to add it to its "
        "gradient",
    ),
    Mistake(
        "factor-forgotten",
        "P was computed with the first Q again, expected the Q of the step before",
        "keep the summed Q: self.factors.keep",
    ),
)
UNNAMED = (
    Mistake(
        "sum-subtracted",
        "each rank subtracted the whole sum P Qᵀ to get its residual, expected it to "
        "subtract only its share, P Qᵀ / n",
        "the residual is M - P Qᵀ / n: each rank has sent its share of the sum",
    ),
    Mistake(
        "own-factor-kept",
        "each rank started from its own factor Q of the last step, expected the sum of "
        "all ranks' factors",
        "keep Q after its all_reduce: the next P adds up products with the same Q",
    ),
)
"""Mistakes that are told, but aren't misconceptions with a page of their own."""


def _suspects(
    seed: int, n: int, step: int, bucket: int, part: slice, slugs: tuple[str, ...]
) -> list[Suspect]:
    return [
        Suspect(
            slug=one.slug if one in MISTAKES else "",
            values=[flat[part] for flat in expected(seed, n, one.slug)[step][bucket]],
            sentence=f"in step {step + 1}, {one.sentence}",
            rule=one.rule,
        )
        for one in (*MISTAKES, *UNNAMED)
        if one.slug in slugs
    ]


def _expect(
    runs: Runs, step: int, bucket: int, part: slice, what: str, *slugs: str
) -> None:
    n, seed = runs.world_size, runs.seed
    actual = sums_of(runs.finished(compress), step, bucket)
    expect_values(
        [flat[part] for flat in actual],
        [flat[part] for flat in expected(seed, n)[step][bucket]],
        what=f"after step {step + 1}, {what} of bucket {bucket}",
        suspects=partial(_suspects, seed, n, step, bucket, part, slugs),
        tolerance=NEAR,
    )


@clause(TASK, "C1", worlds=WORLDS, runs=_plays)
def low_rank_is_exact(runs: Runs) -> str | None:
    """The first step of bucket 0, whose sum has the rank 2."""
    part = slice(0, MATRIX)
    _expect(runs, 0, 0, part, "the matrix", "not-orthonormal", "factor-not-summed")
    run = runs.finished(compress)
    expect_messages(run, "bucket.flat is right, but comm was not used")
    matrices = [flat[part] for flat in sums_of(run, 0, 0)]
    expect_equal_bits(matrices, what="the matrix after wait()", slug="own-order-sum")
    expect_low_rank(runs)
    return f"n = {runs.world_size}: rank {RANK} of {ROWS} × {COLUMNS}"


@clause(TASK, "C2", worlds=WORLDS, runs=_plays)
def others_are_exact(runs: Runs) -> str | None:
    """The elements of parameters with one dimension, in every step."""
    for step, bucket in product(range(STEPS), range(NUM_BUCKETS)):
        part = slice(MATRIX, None)
        _expect(runs, step, bucket, part, "the one-dimensional part")
    expect_others(runs)
    return None


@clause(TASK, "C3", worlds=WORLDS, runs=_plays)
def residual_and_factor_are_kept(runs: Runs) -> str | None:
    """Matrices of full rank, in every step."""
    with judged_after(low_rank_is_exact, runs, "C1"):
        for step, bucket in product(range(STEPS), range(NUM_BUCKETS)):
            _expect(
                runs,
                step,
                bucket,
                slice(0, MATRIX),
                "the matrix",
                "no-error-feedback",
                "factor-forgotten",
                *(one.slug for one in UNNAMED),
            )
        _expect_residuals(runs)
    if runs.world_size > 1:  # what is sent dense is C4's, and one rank sends nothing
        with judged_after(factors_only, runs, "C4"):
            expect_kept(runs)
    return f"{STEPS} steps of {NUM_BUCKETS} buckets"


def _expect_residuals(runs: Runs) -> None:
    """The ranks' residuals add up to what the sums of all steps lack."""
    n, seed = runs.world_size, runs.seed
    steps, sums = gradients(seed, n), expected(seed, n)
    run = runs.finished(compress)
    for bucket in range(NUM_BUCKETS):
        own = torch.stack([one for step in steps for one in step[bucket]]).sum(0)
        right = own - torch.stack([step[bucket][0] for step in sums]).sum(0)
        kept = [value["kept"][bucket] for value in run.values if value["kept"]]
        left = torch.stack(kept).sum(0) if kept else torch.zeros_like(right)
        if not close(left[:MATRIX], right[:MATRIX], 1e-6):
            is_empty = not bool(left[:MATRIX].any())
            raise NotYetError(
                f"after {STEPS} steps, the ranks' self.residuals for bucket {bucket} "
                + ("are empty" if is_empty else "add up to other values")
                + ", expected the part that the ranks have not sent",
                evidence=[
                    (NOBODY, "add up to", brief(left[:MATRIX])),
                    (NOBODY, "expected", brief(right[:MATRIX])),
                ],
                rule="self.residuals.keep(bucket, rest), and self.residuals.of(bucket)",
            )


@clause(TASK, "C4", worlds=WORLDS, runs=_plays)
def factors_only(runs: Runs) -> str | None:
    """The bytes of the collectives, by their cost."""
    n = runs.world_size
    run = runs.finished(compress)
    expect_work(run)
    expect_one_wait(runs)
    numbers = RANK * (ROWS + COLUMNS) + OTHERS
    limit = 2 * (n - 1) / n * numbers * 8
    if over := bytes_over(run, STEPS, limit):
        rank, sent = over
        raise NotYetError(
            f"for a bucket with a {ROWS} × {COLUMNS} matrix, rank {rank} sends "
            f"{sent:.0f} bytes, expected at most {limit:.0f}: P, Q and {OTHERS} other "
            "elements",
            evidence=heard_lines(run),
        )
    expect_factors_only(runs)
    return f"n = {n}: {numbers} numbers of {MATRIX + OTHERS}"


@clause(TASK, "C5", worlds=(3, 2), runs=_plays)
def the_call_returns_at_once(runs: Runs) -> str | None:
    """Calls and waits between the call of the hook and its return."""
    expect_no_wait_in_call(runs.finished(compress))
    expect_no_wait_in_call(runs.finished(compress_several))
    return None
