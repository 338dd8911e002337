"""Judging 4.15 where buckets have no, one, two or three matrices."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from distlab.grading.checks.gradient_compression.hooked import expect_work, heard_lines
from distlab.grading.checks.gradient_compression.matrices import (
    EMPTY,
    LOW,
    MATRICES,
    MOVED,
    OTHERS,
    RANK,
    SHAPES,
    SIZES,
    STEPS,
    compress_several,
    expected,
    layout,
    narrow_dtype,
    sides,
)
from distlab.grading.kit.values import Suspect, expect_values
from distlab.grading.runs import Runs
from distlab.grading.verdict import NotYetError
from distlab.runner import Run

NUMBERS = {0: "no matrix", 1: "one matrix", 2: "two matrices", 3: "three matrices"}
NEAR = {"float64": 1e-7, "float32": 1e-3}
SENTENCES = {
    "not-orthonormal": "P Qᵀ was computed with a P whose columns are not orthonormal",
    "factor-not-summed": "every rank multiplied with its own Q: the ranks' Q were not "
    "added",
    "no-error-feedback": "what the steps before did not send of it is lost",
    "factor-forgotten": "it begins with its first Q again",
}
_REDUCE = ("all_reduce", "reduce_scatter", "reduce")


def _where(step: int, parameter: int) -> str:
    """`in step 3, matrix 2 of a bucket's 3 (5 × 6)`."""
    (places,) = [one for one in layout(step) if parameter in one]
    matrices = [i for i in places if i in MATRICES]
    moved = ", in another bucket than before" if step == MOVED else ""
    rows, columns = sides(parameter)
    which = "a bucket's only matrix"
    if len(matrices) > 1:
        which = f"matrix {matrices.index(parameter) + 1} of a bucket's {len(matrices)}"
    return f"in step {step + 1}{moved}, {which} ({rows} × {columns})"


def _run(runs: Runs, dtype: str = "float64") -> Run:
    values = {} if dtype == "float64" else {"dtype": dtype}
    run = runs.finished(compress_several, **values)
    expect_work(run)
    return run


def _parts(run: Run, step: int, parameter: int) -> list[Tensor]:
    return [value["sums"][step][parameter] for value in run.values]


def _suspects(
    runs: Runs, step: int, parameter: int, slugs: tuple[str, ...]
) -> list[Suspect]:
    return [
        Suspect(
            slug=slug,
            values=expected(runs.seed, runs.world_size, slug)[step][parameter],
            sentence=f"{_where(step, parameter)} {SENTENCES[slug]}",
        )
        for slug in slugs
    ]


def _expect(
    runs: Runs, step: int, parameter: int, *slugs: str, dtype: str = "float64"
) -> None:
    suffix = "" if dtype == "float64" else f" in {dtype}"
    expect_values(
        _parts(_run(runs, dtype), step, parameter),
        expected(runs.seed, runs.world_size)[step][parameter],
        what=f"{_where(step, parameter)}{suffix}",
        suspects=partial(_suspects, runs, step, parameter, slugs),
        tolerance=NEAR[dtype],
    )


def expect_order(runs: Runs) -> None:
    """The parts of a bucket are where its parameters are.

    Raises:
        NotYetError: the matrices are first in bucket.flat, and then the others.
    """
    run = _run(runs)
    right = expected(runs.seed, runs.world_size)[0]
    for places in layout(0):
        turned = sorted(places, key=lambda i: i in OTHERS)
        if turned == places:
            continue
        for rank, value in enumerate(run.values):
            actual = torch.cat([value["sums"][0][i] for i in places])
            guess = torch.cat([right[i][rank] for i in turned])
            if torch.allclose(actual, guess, rtol=0, atol=1e-6):
                raise NotYetError(
                    f"step 1: on rank {rank} a bucket has its matrices first and then "
                    "its other elements, but its parameters have another order",
                    rule="join(bucket, matrices, others) keeps the order",
                )


def expect_low_rank(runs: Runs) -> None:
    """The first step, in which the sum of every matrix has the rank RANK or less.

    Raises:
        NotYetError: a matrix is not the sum.
    """
    expect_order(runs)
    run = _run(runs)
    for parameter in (i for i in MATRICES if i not in (EMPTY, LOW)):
        _expect(runs, 0, parameter, "not-orthonormal", "factor-not-summed")
    for parameter, what in ((EMPTY, "is zero"), (LOW, "has the rank 1, not 2")):
        right = expected(runs.seed, runs.world_size)[0][parameter]
        actual = _parts(run, 0, parameter)
        about = f"step 1: the ranks' sum of a matrix {what}"
        for rank, one in enumerate(actual):
            if not bool(one.isfinite().all()):
                raise NotYetError(f"{about}; on rank {rank} bucket.flat becomes nan")
        expect_values(actual, right, what=f"{about}; bucket.flat", tolerance=1e-7)
    dtype = narrow_dtype(runs.world_size)
    for parameter in MATRICES:
        if dtype in NEAR:
            _expect(runs, 0, parameter, dtype=dtype)
            continue
        # How far off is a matter of luck: a P whose columns are nearly parallel.
        for rank, one in enumerate(_parts(_run(runs, dtype), 0, parameter)):
            if not bool(one.isfinite().all()):
                about = f"{_where(0, parameter)} in {dtype}"
                raise NotYetError(f"{about} is not finite on rank {rank}")


def expect_others(runs: Runs) -> None:
    """What is in no matrix is the sum in every step, also without a matrix beside it.

    Raises:
        NotYetError: it is not.
    """
    for step in range(STEPS):
        for places in layout(step):
            matrices = NUMBERS[min(3, sum(i in MATRICES for i in places))]
            for parameter in (i for i in places if i in OTHERS):
                shape = list(SHAPES[parameter])
                expect_values(
                    _parts(_run(runs), step, parameter),
                    expected(runs.seed, runs.world_size)[step][parameter],
                    what=f"step {step + 1}, a bucket of {matrices}: the parameter of "
                    f"shape {shape}",
                    tolerance=1e-7,
                )


def expect_kept(runs: Runs) -> None:
    """All steps after the first.

    Raises:
        NotYetError: a residual or a Q was not kept, or not for its matrix.
    """
    run = _run(runs)
    for step in range(1, STEPS):
        for parameter in (i for i in MATRICES if i not in (EMPTY, LOW)):
            _expect(runs, step, parameter, "no-error-feedback", "factor-forgotten")
    for rank, value in enumerate(run.values):
        later = [value["sums"][step][EMPTY] for step in range(1, STEPS)]
        if not any(bool(part.any()) for part in later):
            raise NotYetError(
                f"rank {rank}: a matrix whose gradient was zero in step 1 is zero in "
                "all later steps: its Q has become zero, and so has its P",
                rule="a P of zeros needs orthonormal columns too",
            )
        if float(value["kept"].abs().max()) > 1e-6:
            raise NotYetError(
                f"rank {rank} keeps a residual for parameters of fewer than two "
                "dimensions, which were summed exactly",
                rule="their residual is zero",
            )


def expect_one_wait(runs: Runs) -> None:
    """A second wait() of the same Work does nothing.

    Raises:
        NotYetError: it calls comm again.
    """
    for record in _run(runs).ranks:
        for op, _, when, *_ in record.value["heard"]:
            if when == "again" and op != "wait()":
                raise NotYetError(
                    f"rank {record.rank}: the second wait() of the same Work calls "
                    f"{op} again",
                    rule="Later calls finish once",
                )


def expect_factors_only(runs: Runs) -> None:
    """Bytes, and how many all_reduces.

    Raises:
        NotYetError: a rank sends more, or in more parts.
    """
    n = runs.world_size
    for dtype in ("float64", narrow_dtype(n)):
        size = getattr(torch, dtype).itemsize
        run = _run(runs, dtype)
        numbers = sum(SIZES[i] for i in OTHERS)
        for parameter in MATRICES:
            rows, columns = sides(parameter)
            numbers += min(RANK, rows, columns) * (rows + columns)
        # What is cut into equal parts for a reduce_scatter is padded: less than n.
        padding = 2 * n * len(layout(0))
        limit = STEPS * 2 * (n - 1) / n * (numbers + padding) * size
        for record in run.ranks:
            if record.sent_bytes > limit:
                raise NotYetError(
                    f"rank {record.rank} sends {record.sent_bytes:,.0f} bytes in "
                    f"{STEPS} steps of buckets with no to three matrices of {dtype}, "
                    f"expected at most {limit:,.0f}: P, Q and the other elements",
                    evidence=heard_lines(run),
                )
    _expect_two_sums(_run(runs))


def _expect_two_sums(run: Run) -> None:
    for record in run.ranks:
        for step, of_buckets in enumerate(record.value["counts"]):
            for places, ops in zip(layout(step), of_buckets, strict=True):
                count = sum(op in _REDUCE for op in ops)
                if count <= 2:
                    continue
                matrices = NUMBERS[min(3, sum(i in MATRICES for i in places))]
                raise NotYetError(
                    f"rank {record.rank} adds up {count} messages for a bucket of "
                    f"{matrices}, expected two: every P and the other elements in one, "
                    "every Q in the other",
                    evidence=heard_lines(run),
                    rule="torch.cat before the all_reduce, split after it",
                )
