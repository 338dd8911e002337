"""Checks of task 2.16: f and g, forward and backward, and what they leave alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.comm import Comm
from distlab.grading.checks.tensor_parallel.shared import (
    WORLDS,
    CountedComm,
    as_tensor,
    drawn,
    expect_calls,
)
from distlab.grading.clause import clause
from distlab.grading.kit.any_tensor import expect_each, tensor_of
from distlab.grading.kit.messages import reports_made
from distlab.grading.kit.plans import in_call
from distlab.grading.kit.values import all_close, expect_values, same_everywhere
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, RankRecord, Run

SHAPE = (2, 3, 4)
OTHERS: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = (
    (torch.bfloat16, ()),
    (torch.float32, (0,)),
)

# ── what runs in the ranks ──────────────────────────────────────────────────────────


def passages_once(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Each way by itself, and then on tensors that do not lie in one piece."""
    comm = CountedComm(context.comm)
    rank, device = context.rank, comm.device
    marks: dict[str, list[int]] = {}
    same, own = drawn(seed, -1, *SHAPE), drawn(seed, rank, *SHAPE)
    crossed = _crossed_on(seed, rank).to(device)
    one = torch.full((), 2.0 + rank, dtype=torch.float64, device=device)
    found: dict[str, Any] = {}
    context.report("f")
    found["enter"] = _there_and_back(
        comm, unit.copy_to_region, same.to(device), own.to(device), marks, "f"
    )
    odd = {
        "enter": _back(comm, unit.copy_to_region, same.to(device), one.expand(SHAPE)),
        "crossed": _back(comm, unit.copy_to_region, same.to(device), crossed),
    }
    context.report("g")
    found["leave"] = _there_and_back(
        comm, unit.reduce_from_region, own.to(device), same.to(device), marks, "g"
    )
    first = unit.reduce_from_region(comm, own.clone().to(device))
    odd["leave"] = as_tensor(unit.reduce_from_region(comm, crossed))
    odd["first"] = as_tensor(first)
    found["odd"] = odd
    found["any"] = []
    for dtype, shape in OTHERS:
        x = tensor_of(seed, rank, dtype, shape).to(device)
        with in_call(f"reduce_from_region of a tensor of shape {list(shape)}"):
            y = unit.reduce_from_region(comm, x.clone())
        found["any"].append([x, as_tensor(y)])
    found["elsewhere"] = _in_two_groups(comm, unit, same.to(device), own.to(device))
    return {**found, "marks": marks}


def _in_two_groups(comm: Comm, unit: ModuleType, x: Tensor, gradient: Tensor) -> int:
    """How often the way back of the first group calls the second group's comm."""
    first, second = x.clone().requires_grad_(), CountedComm(comm)
    y = unit.copy_to_region(comm, first)
    unit.copy_to_region(second, x.clone().requires_grad_())
    begin = second.count
    _gradient(y, first, gradient.clone())
    return second.count - begin


def _played(runs: Runs, clause_id: str = "") -> Run:
    """The run of both ways; where it failed on the way out, C1 is not to blame."""
    try:
        return runs.finished(passages_once)
    except NotYetError as failure:
        if clause_id == "C1" and failure.run and reports_made(failure.run) > 1:
            raise NotJudgedError("reduce_from_region failed: see C2") from None
        raise


Way = Callable[[Comm, Tensor], Tensor]


def _there_and_back(
    comm: CountedComm,
    way: Way,
    given: Tensor,
    gradient: Tensor,
    marks: dict[str, list[int]],
    name: str,
) -> dict[str, Any]:
    x, before, begin = given.clone().requires_grad_(), gradient.clone(), comm.count
    y = way(comm, x)
    middle = comm.count
    out = as_tensor(y)
    back = _gradient(y, x, gradient)
    marks[f"{name} forward"] = [begin, middle]
    marks[f"{name} backward"] = [middle, comm.count]
    return {
        "given": given,
        "after": as_tensor(x),
        "out": out,
        "gradient": before,
        "gradient after": gradient,
        "back": back,
        "tracked": isinstance(y, Tensor) and y.requires_grad,
    }


def _back(comm: Comm, way: Way, given: Tensor, gradient: Tensor) -> Tensor:
    x = given.clone().requires_grad_()
    return _gradient(way(comm, x), x, gradient)


def _gradient(y: object, x: Tensor, gradient: Tensor) -> Tensor:
    if not isinstance(y, Tensor) or not y.requires_grad:
        return torch.empty(0)
    return as_tensor(torch.autograd.grad(y, x, gradient, allow_unused=True)[0])


# ── C1 f ────────────────────────────────────────────────────────────────────────────


def _each(run: Run, way: str, what: str) -> list[Tensor]:
    return [value[way][what] for value in run.values]


@clause(
    "tensor_parallel.copy_reduce", "C1", worlds=WORLDS, runs=[on_ranks(passages_once)]
)
def the_way_in(runs: Runs) -> str | None:
    """Forward x, backward the sum."""
    run = _played(runs, "C1")
    n, x = runs.world_size, _each(run, "enter", "given")
    expect_values(
        _each(run, "enter", "out"),
        x,
        what="the output of copy_to_region",
    )
    gradients = _each(run, "enter", "gradient")
    expect_values(
        _each(run, "enter", "back"),
        same_everywhere(torch.stack(gradients).sum(0), n),
        what="the gradient of copy_to_region's x",
        parts=gradients,
    )
    expect_values(
        [value["odd"]["crossed"] for value in run.values],
        same_everywhere(torch.stack(_crossed(runs.seed, n)).sum(0), n),
        what="for a transposed gradient with inf on rank 0, the gradient of x",
    )
    if any(value["elsewhere"] for value in run.values):
        raise NotYetError(
            "when copy_to_region runs in two groups, the first call's backward sums "
            "over the second group, expected the first",
            rule="keep comm on ctx: each call has its own",
        )
    return None


def _with_any(run: Run) -> tuple[RankRecord, ...]:
    return tuple(replace(one, value=one.value["any"]) for one in run.ranks)


def _crossed(seed: int, n: int) -> list[Tensor]:
    """What does not lie in one piece, by rank."""
    return [_crossed_on(seed, rank) for rank in range(n)]


def _crossed_on(seed: int, rank: int) -> Tensor:
    """The same on a rank; rank 0 has a value that is inf, and rank 1 only zeros."""
    crossed = drawn(seed + 1, rank, *SHAPE[::-1]).transpose(0, 2)
    crossed *= rank != 1
    crossed[0, 0, 0] = torch.inf if rank == 0 else crossed[0, 0, 0]
    return crossed


# ── C2 g ────────────────────────────────────────────────────────────────────────────


@clause(
    "tensor_parallel.copy_reduce", "C2", worlds=WORLDS, runs=[on_ranks(passages_once)]
)
def the_way_out(runs: Runs) -> str | None:
    """Forward the sum, backward the gradient."""
    run = _played(runs)
    n, own = runs.world_size, _each(run, "leave", "given")
    total = torch.stack(own).sum(0)
    expect_values(
        _each(run, "leave", "out"),
        same_everywhere(total, n),
        what="the output of reduce_from_region",
        parts=own,
    )
    gradients = _each(run, "leave", "gradient")
    expect_values(
        _each(run, "leave", "back"),
        gradients,
        what="the gradient of reduce_from_region's x",
    )
    expect_values(
        [value["odd"]["leave"] for value in run.values],
        same_everywhere(torch.stack(_crossed(runs.seed, n)).sum(0), n),
        what="for a transposed x with inf on rank 0, the sum",
    )
    if not all_close([value["odd"]["first"] for value in run.values], [total] * n):
        raise NotYetError(
            "the tensor that reduce_from_region returned changes in the next call, "
            "expected a new tensor each time",
            rule="the sum in a new tensor, each time",
        )
    any_run = replace(run, ranks=_with_any(run))
    expect_each(
        any_run,
        lambda given: same_everywhere(sum(given[1:], given[0]), n),
        "the output of reduce_from_region",
    )
    return None


# ── C3 what is the caller's ─────────────────────────────────────────────────────────


@clause(
    "tensor_parallel.copy_reduce", "C3", worlds=WORLDS, runs=[on_ranks(passages_once)]
)
def what_is_the_callers(runs: Runs) -> str | None:
    """Neither x nor the incoming gradient has changed by a bit."""
    run = _played(runs)
    for way, name in (("leave", "reduce_from_region"), ("enter", "copy_to_region")):
        for before, after, what in (
            ("given", "after", "the caller's x"),
            ("gradient", "gradient after", "the gradient that backward() was given"),
        ):
            wrong = [
                rank
                for rank, value in enumerate(run.values)
                if not torch.equal(value[way][before], value[way][after])
            ]
            if wrong:
                raise NotYetError(
                    f"{name} modified {what} on rank {wrong[0]}, expected it unchanged",
                    slug="autograd-input-changed",
                    evidence=[
                        (rank, "changed", f"{what} has other values") for rank in wrong
                    ],
                    rule="all_reduce works in place: pass a clone",
                )
    return None


# ── C4 messages ─────────────────────────────────────────────────────────────────────


@clause(
    "tensor_parallel.copy_reduce", "C4", worlds=WORLDS, runs=[on_ranks(passages_once)]
)
def one_all_reduce_each(runs: Runs) -> str | None:
    """Only f sends backward, and only g sends forward."""
    run = _played(runs)
    expect_calls(
        run,
        [
            ("copy_to_region's forward", "f forward", []),
            ("copy_to_region's backward", "f backward", ["all_reduce"]),
            ("reduce_from_region's forward", "g forward", ["all_reduce"]),
            ("reduce_from_region's backward", "g backward", []),
        ],
        slug="more-messages-than-needed",
        rule="f sums backward and g sums forward: one all_reduce each",
    )
    return f"n = {runs.world_size}: one all_reduce each, f backward and g forward"
