"""Checks of 3.3: the sum everywhere; and the values that 3.2 and 3.5 use too.

The values come in two kinds. "uneven" are float64 of very different sizes: another
order of additions gives other bits; "not finite" are the same, with an inf and a nan
on rank 1. "digits" are int64, 16^r on rank r: what they add up to says how often each
rank's tensor is in it.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.grading.checks.ring_allreduce.counts import digits
from distlab.grading.checks.ring_allreduce.mistakes import (
    Sums,
    expect_sums,
    mean_mistakes,
)
from distlab.grading.checks.ring_allreduce.steps import (
    MANY,
    expect_few_steps,
    expect_ring,
    told,
)
from distlab.grading.clause import clause, judged_after
from distlab.grading.kit.lent import expect_own_memory, lend
from distlab.grading.kit.messages import calls_of_each, expect_messages, numbers
from distlab.grading.kit.values import SINGLE, expect_values, same_everywhere
from distlab.grading.runs import Runs, RunSpec, in_rounds, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run

WORLDS = (3, 2, 4, 1)  # reduce_scatter, on which the rest builds, also on 7
HAS_INF_AND_NAN = " (inf and nan on rank 1)"
TWO_ON_THREE = "with a tensor of 2 elements on 3 ranks"
ONE_ON_FOUR = "with a tensor of 1 element on 4 ranks"
EMPTY = "with an empty tensor"
WITH_INF = "when rank 1 has an inf and a nan"
ODD = {
    "strided": "with every second column of a matrix",
    "transposed": "with a transposed matrix",
    "scalar": "with a tensor without dimensions",
    "again": "in a second call",
}
"""What is special about some kinds of tensors; see `ring_once`."""
LENGTH = 13  # what no world size divides
DTYPES = {
    "single": torch.float32,
    "half": torch.float16,
    "short": torch.int32,
    "byte": torch.int8,
}
NOT_FINITE = "not finite"
IN_DIGITS = ("half", "short", "byte")  # what is added up stays exact in float16


def values_of(kind: str, seed: int, rank: int, length: int) -> Tensor:
    """A rank's numbers."""
    if kind == "digits":
        return digits(rank, length)
    powers = 10.0 ** torch.arange(length).remainder(7)
    values = numbers(seed, rank, length) * powers
    if kind == NOT_FINITE and rank == 1:
        values[1], values[length // 2 - 1] = torch.inf, torch.nan
    return values


def ring_once(
    context: RankContext,
    unit: ModuleType,
    seed: int,
    kind: str = "uneven",
    length: int = LENGTH,
    average: bool = False,
) -> dict[str, Any]:
    """One all_reduce. Some kinds are about the tensor more than about its values.

    "strided" is every second column of a matrix; "transposed" is a matrix too, and
    clone() keeps its strides; "scalar" has no dimension at all; "again" comes after
    another call, with the same shape. See DTYPES for "single", "half", "short", "byte".
    """
    comm = context.comm
    values = "digits" if kind in IN_DIGITS else kind
    memory = values_of(values, seed, context.rank, 2 * length)
    memory = memory.to(DTYPES.get(kind, memory.dtype)).to(comm.device)
    tensor = memory[:length]
    if kind == "strided":
        tensor = memory.view(-1, 2)[:, 0]
    elif kind == "transposed":
        tensor = memory[:12].view(4, 3).T
    elif kind == "scalar":
        tensor = memory[0]
    elif kind == "again":
        unit.all_reduce(comm, numbers(seed + 1, context.rank, length).to(comm.device))
    lent = lend(tensor, memory)
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
        **lent.left(),
        "returned": returned if isinstance(returned, Tensor) else None,
        "raised": raised,
    }


def _sums(world_size: int) -> list[RunSpec]:
    plays: list[RunSpec] = [on_ranks(ring_once), on_ranks(ring_once, kind="digits")]
    if world_size == 3:
        plays += [on_ranks(ring_once, kind=kind).when(ODD[kind]) for kind in ODD]
        plays += [on_ranks(ring_once, length=2).when(TWO_ON_THREE)]
        plays += [on_ranks(ring_once, length=0).when(EMPTY)]
        plays += [on_ranks(ring_once, kind=NOT_FINITE, length=12).when(WITH_INF)]
        plays += [
            on_ranks(ring_once, kind="half", length=10 * LENGTH).when(
                "with a float16 tensor"
            )
        ]
    if world_size == 4:
        plays += [on_ranks(ring_once, length=1).when(ONE_ON_FOUR)]
    return plays


@clause("ring_allreduce.all_reduce", "C1", worlds=WORLDS, runs=_sums)
def sum_everywhere(runs: Runs) -> str | None:
    """The sum in the caller's tensor, the same bits on all ranks."""
    for spec in _sums(runs.world_size):
        run = runs.finished(spec)
        digits = runs.ended(ring_once, kind="digits")
        counts = Sums(digits) if digits.outcome == "finished" else None
        _expect_no_refusal(run)
        expect_own_memory(run, run.values, "all_reduce")
        expect_sums(Sums(run), "all_reduce", counts, **_said(dict(spec.values)))
    return None


def _said(values: dict[str, Any]) -> dict[str, str]:
    """How to speak of a tensor that is not like the others."""
    kinds = {
        "strided": " (every second column of a matrix)",
        "transposed": " (a transposed matrix)",
        "scalar": " (0-dim)",
        "half": " (float16)",
        NOT_FINITE: HAS_INF_AND_NAN,
    }
    said = kinds.get(values.get("kind", ""), "")
    if values.get("length") in (1, 2):
        plural = "s" * (values["length"] > 1)
        said = f" ({values['length']} element{plural})"
    if values.get("kind") == "again":
        said = " (of a second call)"
    return {"aside": said}


def _expect_no_refusal(run: Run) -> None:
    for record, value in zip(run.ranks, run.values, strict=True):
        if value["raised"]:
            raise NotYetError(
                f"for an {_dtype(value)} tensor without average=True, all_reduce "
                f"raised a {value['raised']} on rank {record.rank}, expected the sum",
                rule="int64 can be summed; only its mean is not an int64",
            )


def _dtype(value: dict[str, Any]) -> str:
    return str(value["before"].dtype).removeprefix("torch.")


def _means(world_size: int) -> list[RunSpec]:
    kinds = ("uneven", "digits") + ("single", "short", "byte") * (world_size == 3)
    plays: list[RunSpec] = [
        on_ranks(ring_once, average=True, kind=kind).when("with average=True")
        for kind in kinds
    ]
    if world_size == 3:
        empty = on_ranks(ring_once, average=True, kind="short", length=0)
        plays += [empty.when("with average=True and an empty int32 tensor")]
    return plays


@clause("ring_allreduce.all_reduce", "C2", worlds=(3, 2, 4, 1), runs=_means)
def mean_on_request(runs: Runs) -> str | None:
    """The sum divided by n; a mean of integers is refused, nothing sent."""
    for spec in _means(runs.world_size):
        if dict(spec.values)["kind"] in ("digits", "short", "byte"):
            _expect_refusal(runs.finished(spec))
            continue
        with judged_after(sum_everywhere, runs, "C1"):
            _expect_mean(runs.finished(spec))
    return None


def _expect_refusal(run: Run) -> None:
    rule = "look at tensor.is_floating_point() before anything is sent"
    for record, value in zip(run.ranks, run.values, strict=True):
        empty = " empty" * (not value["before"].numel())
        what = f"for an{empty} {_dtype(value)} tensor with average=True, all_reduce"
        raised = f"a {value['raised']}" if value["raised"] else "nothing"
        if value["raised"] != "ValueError":
            raise NotYetError(
                f"{what} raised {raised}, expected a ValueError",
                slug="whole-numbers-averaged",
                rule=rule,
            )
        if record.calls():
            raise NotYetError(
                f"{what} raised a ValueError only after rank {record.rank} had sent "
                f"{record.messages:.0f} messages, expected it before the first",
                evidence=calls_of_each(run),
                rule=rule,
            )
        if not torch.equal(value["after"], value["before"]):
            raise NotYetError(
                f"{what} raised a ValueError, but changed rank {record.rank}'s tensor, "
                "expected no change",
                rule=rule,
            )


def _expect_mean(run: Run) -> None:
    n, sums = run.world_size, Sums(run)
    expect_messages(run, "a mean over the ranks needs messages")
    is_single = sums.total.dtype == torch.float32
    expect_values(
        sums.after,
        same_everywhere(sums.total / n, n),
        what="after all_reduce with average=True, the tensor"
        + " (float32)" * is_single,
        tolerance=SINGLE if is_single else 1e-12,
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
    """2(n - 1) messages of a chunk, to one neighbor, 2(n - 1) steps."""
    run = runs.finished(ring_once)
    expect_ring(run, LENGTH, halves=2)
    if runs.world_size == 4:
        expect_few_steps(runs, RING_ON_MANY, 2)
    return told(run, LENGTH)
