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
    "not-orthonormal": "the columns of P are not orthonormal, expected orthonormal "
    "columns",
    "factor-not-summed": "every rank used its own Q, expected the sum of all ranks' Q",
    "no-error-feedback": "the residual of earlier steps is lost, expected each rank to "
    "add it to its gradient",
    "factor-forgotten": "P was computed with the first Q again, expected the Q of the "
    "step before",
}
_REDUCE = ("all_reduce", "reduce_scatter", "reduce")


def _where(step: int, parameter: int) -> str:
    """`in step 3, matrix 2 of 3 (5 × 6)`."""
    return f"{_when(step)}, {_matrix(step, parameter)}"


def _when(step: int) -> str:
    moved = ", with other buckets" if step == MOVED else ""
    return f"in step {step + 1}{moved}"


def _matrix(step: int, parameter: int) -> str:
    (places,) = [one for one in layout(step) if parameter in one]
    matrices = [i for i in places if i in MATRICES]
    rows, columns = sides(parameter)
    which = "the only matrix"
    if len(matrices) > 1:
        which = f"matrix {matrices.index(parameter) + 1} of {len(matrices)}"
    return f"{which} ({rows} × {columns})"


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
            sentence=f"{_when(step)}, for {_matrix(step, parameter)}, "
            f"{SENTENCES[slug]}",
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
                    f"after step 1, rank {rank}'s bucket.flat holds the matrices "
                    "first, expected the order of the bucket's parameters",
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
    for parameter, what in ((EMPTY, "is zero"), (LOW, f"has rank 1, below {RANK}")):
        right = expected(runs.seed, runs.world_size)[0][parameter]
        actual = _parts(run, 0, parameter)
        about = f"when the ranks' sum of a matrix {what}"
        for rank, one in enumerate(actual):
            if not bool(one.isfinite().all()):
                raise NotYetError(
                    f"{about}, bucket.flat is not finite on rank {rank} after wait(), "
                    "expected the sum"
                )
        expect_values(actual, right, what=f"{about}, bucket.flat", tolerance=1e-7)
    dtype = narrow_dtype(runs.world_size)
    for parameter in MATRICES:
        if dtype in NEAR:
            _expect(runs, 0, parameter, dtype=dtype)
            continue
        # How far off is a matter of luck: a P whose columns are nearly parallel.
        for rank, one in enumerate(_parts(_run(runs, dtype), 0, parameter)):
            if not bool(one.isfinite().all()):
                about = f"{_where(0, parameter)} in {dtype}"
                raise NotYetError(
                    f"{about} is not finite on rank {rank}, expected the sum"
                )


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
                    what=f"in step {step + 1}, the parameter of shape {shape} in a "
                    f"bucket with {matrices}",
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
                f"after a zero gradient in step 1, P and Q of a matrix on rank {rank} "
                "stay zero in all later steps, expected a P with orthonormal columns",
                rule="a P of zeros needs orthonormal columns too",
            )
        if float(value["kept"].abs().max()) > 1e-6:
            raise NotYetError(
                f"rank {rank} keeps a residual for parameters with fewer than two "
                "dimensions, expected a residual of zero",
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
                    f"when wait() is called twice on the same Work, rank {record.rank} "
                    f"calls {op} again, expected the second wait() to do nothing",
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
                    f"in {STEPS} steps with {dtype} buckets, rank {record.rank} sends "
                    f"{record.sent_bytes:,.0f} bytes, expected at most {limit:,.0f}: "
                    "P, Q and the other elements",
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
                    f"for a bucket with {matrices}, rank {record.rank} makes {count} "
                    "reductions, expected two: one of all P and the other elements, "
                    "one of all Q",
                    evidence=heard_lines(run),
                    rule="torch.cat before the all_reduce, split after it",
                )
