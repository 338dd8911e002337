"""Checks of 3.2 and 3.3: one chunk of the sum on each rank, and all of it everywhere.

The values come in two kinds. "uneven" are float64 of very different sizes: another
order of additions gives other bits. "digits" are int64, 16^r on rank r: what they
add up to says how often each rank's tensor is in it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.grading.checks.ring_allreduce.bounds import read_bounds
from distlab.grading.checks.ring_allreduce.counts import digits
from distlab.grading.checks.ring_allreduce.mistakes import (
    Sums,
    expect_owners,
    expect_sums,
    mean_mistakes,
)
from distlab.grading.checks.ring_allreduce.steps import (
    MANY,
    expect_few_bytes,
    expect_few_messages,
    expect_few_steps,
    expect_one_neighbor,
)
from distlab.grading.clause import clause
from distlab.grading.kit.clause_order import judged_after
from distlab.grading.kit.messages import expect_messages, numbers
from distlab.grading.kit.values import expect_values, same_everywhere
from distlab.grading.runs import Runs, RunSpec, in_rounds, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run

WORLDS = (3, 2, 4, 1)  # reduce_scatter, on which the rest builds, also on 7
LENGTH = 13  # what no world size divides


def values_of(kind: str, seed: int, rank: int, length: int) -> Tensor:
    """A rank's numbers."""
    if kind == "digits":
        return digits(rank, length)
    powers = 10.0 ** torch.arange(length).remainder(7)
    return numbers(seed, rank, length) * powers


# ── 3.2 reduce_scatter ──────────────────────────────────────────────────────────────


def scatter_once(
    context: RankContext,
    unit: ModuleType,
    seed: int,
    kind: str = "uneven",
    length: int = LENGTH,
) -> dict[str, Any]:
    """One reduce_scatter, and the bounds of the chunks."""
    tensor = values_of(kind, seed, context.rank, length).to(context.comm.device)
    before = tensor.clone()
    owner = unit.reduce_scatter(context.comm, tensor)
    return {
        "before": before,
        "after": tensor,
        "owner": owner if isinstance(owner, int) else repr(owner)[:40],
        "bounds": read_bounds(unit.chunk_bounds(length, context.world_size)),
        "returned": None,
    }


def _scatters(world_size: int) -> list[RunSpec]:
    """Fewer elements than ranks too, and none; each on three ranks."""
    plays: list[RunSpec] = [
        on_ranks(scatter_once),
        on_ranks(scatter_once, kind="digits"),
    ]
    if world_size == 3:
        plays += [on_ranks(scatter_once, length=length) for length in (12, 2, 0)]
    if world_size == 4:
        plays += [on_ranks(scatter_once, length=1)]
    return plays


@clause("ring_allreduce.reduce_scatter", "C1", worlds=(*WORLDS, 7), runs=_scatters)
def own_chunk_is_the_sum(runs: Runs) -> str | None:
    """V: each rank's chunk, the one it says, is the sum; no two say the same."""
    for spec in _scatters(runs.world_size):
        run = runs.finished(spec)
        expect_owners(Sums(run), counts=_counted(runs))
    return None


def _counted(runs: Runs) -> Sums | None:
    """The same in digits, where one can see what was added."""
    run = runs.ended(scatter_once, kind="digits")
    return Sums(run) if run.outcome == "finished" else None


SCATTER_ON_MANY = in_rounds(scatter_once, MANY, 8, length=MANY)


@clause(
    "ring_allreduce.reduce_scatter",
    "C2",
    worlds=(3, 2, 4, 7),
    runs=[on_ranks(scatter_once)],
    later=[SCATTER_ON_MANY],
)
def scatter_is_a_ring(runs: Runs) -> str | None:
    """B, J and T: n - 1 messages of a chunk, to one neighbor, n - 1 steps."""
    n = runs.world_size
    run = runs.finished(scatter_once)
    _expect_ring(run, halves=1)
    if n == 7:
        expect_few_steps(runs, SCATTER_ON_MANY, 1)
    return _told(run, LENGTH)


def _expect_ring(run: Run, halves: int) -> None:
    expect_few_bytes(run, LENGTH, 8, halves)
    expect_few_messages(run, halves)
    expect_one_neighbor(run)


def _told(run: Run, length: int) -> str:
    most = max(record.sent_bytes for record in run.ranks)
    return (
        f"n = {run.world_size}, {length * 8} bytes: each rank sends at most "
        f"{most:.0f} in {run.ranks[0].messages} messages"
    )


# ── 3.3 all_reduce ──────────────────────────────────────────────────────────────────


def ring_once(
    context: RankContext,
    unit: ModuleType,
    seed: int,
    kind: str = "uneven",
    length: int = LENGTH,
    average: bool = False,
) -> dict[str, Any]:
    """One all_reduce. Some kinds are about the tensor more than about its values.

    "strided" is every second column of a matrix; "scalar" has no dimension at all;
    "again" comes after another call, with the same shape.
    """
    comm, rest = context.comm, None
    kept = values_of(kind, seed, context.rank, 2 * length).to(comm.device)
    tensor = kept[:length]
    if kind == "strided":
        kept = kept.view(-1, 2)
        tensor, rest = kept[:, 0], kept[:, 1]
    elif kind == "scalar":
        tensor = kept[0]
    elif kind == "again":
        unit.all_reduce(comm, numbers(seed + 1, context.rank, length).to(comm.device))
    before, beside = tensor.clone(), None if rest is None else rest.clone()
    returned, raised = None, ""
    try:
        arguments = {"average": True} if average else {}
        returned = unit.all_reduce(comm, tensor, **arguments)
    except ValueError as error:
        if tensor.is_floating_point():
            raise
        raised = type(error).__name__
    except RuntimeError as error:
        if tensor.is_floating_point() or "cast" not in str(error):
            raise
        raised = type(error).__name__
    return {
        "before": before,
        "after": tensor,
        "returned": returned if isinstance(returned, Tensor) else None,
        "beside": rest is None or torch.equal(rest, beside),  # type: ignore[arg-type]
        "raised": raised,
    }


def _sums(world_size: int) -> list[RunSpec]:
    plays: list[RunSpec] = [on_ranks(ring_once), on_ranks(ring_once, kind="digits")]
    if world_size == 3:
        odd = ("strided", "scalar", "again")
        plays += [on_ranks(ring_once, kind=kind) for kind in odd]
        plays += [on_ranks(ring_once, length=length) for length in (12, 2, 0)]
    if world_size == 4:
        plays += [on_ranks(ring_once, length=1)]
    return plays


@clause("ring_allreduce.all_reduce", "C1", worlds=WORLDS, runs=_sums)
def sum_everywhere(runs: Runs) -> str | None:
    """V and X: the sum in the caller's tensor, the same bits on all ranks."""
    for spec in _sums(runs.world_size):
        run = runs.finished(spec)
        digits = runs.ended(ring_once, kind="digits")
        counts = Sums(digits) if digits.outcome == "finished" else None
        _expect_no_refusal(run)
        expect_sums(Sums(run), "all_reduce", counts, **_said(dict(spec.values)))
        if not all(value["beside"] for value in run.values):
            raise NotYetError(
                "memory between the elements of a non-contiguous tensor has changed",
                rule="write only to the elements of the caller's tensor",
            )
    return None


def _said(values: dict[str, Any]) -> dict[str, str]:
    """How to speak of a tensor that is not like the others."""
    kinds = {"strided": " (every second column of a matrix)", "scalar": " (0-dim)"}
    said = kinds.get(values.get("kind", ""), "")
    if values.get("kind") == "again":
        said = " (of a second call)"
    return {"aside": said}


def _expect_no_refusal(run: Run) -> None:
    for record, value in zip(run.ranks, run.values, strict=True):
        if value["raised"]:
            raise NotYetError(
                f"a sum of integers: rank {record.rank} raises {value['raised']}",
                rule="int64 can be summed; only its mean is not an int64",
            )


def _means(world_size: int) -> list[RunSpec]:
    return [
        on_ranks(ring_once, average=True),
        on_ranks(ring_once, average=True, kind="digits"),
    ]


@clause("ring_allreduce.all_reduce", "C2", worlds=(3, 2, 4, 1), runs=_means)
def mean_on_request(runs: Runs) -> str | None:
    """V: the sum divided by n; a mean of int64 is refused."""
    n = runs.world_size
    with judged_after(sum_everywhere, runs, "C1"):
        _expect_mean(runs.finished(ring_once, average=True))
    for value in runs.finished(ring_once, average=True, kind="digits").values:
        if value["raised"] != "ValueError":
            what = value["raised"] or "nothing"
            raise NotYetError(
                f"the mean of int64 on {n} ranks: all_reduce raises {what}",
                slug="whole-numbers-averaged",
                rule="look at tensor.is_floating_point() before anything is sent",
            )
    return None


def _expect_mean(run: Run) -> None:
    n, sums = run.world_size, Sums(run)
    expect_messages(run, "a mean over the ranks needs messages")
    expect_values(
        sums.after,
        same_everywhere(sums.total / n, n),
        what="with average=True the tensor",
        tolerance=1e-12,
        suspects=mean_mistakes(sums),
        rule="the mean is the sum divided by the number of ranks, once",
    )


RING_ON_MANY = in_rounds(ring_once, MANY, 8, length=MANY)


@clause(
    "ring_allreduce.all_reduce",
    "C3",
    worlds=(3, 2, 4),
    runs=[on_ranks(ring_once)],
    later=[RING_ON_MANY],
)
def all_reduce_is_a_ring(runs: Runs) -> str | None:
    """B, J and T: 2(n - 1) messages of a chunk, to one neighbor, 2(n - 1) steps."""
    run = runs.finished(ring_once)
    _expect_ring(run, halves=2)
    if runs.world_size == 4:
        expect_few_steps(runs, RING_ON_MANY, 2)
    return _told(run, LENGTH)
