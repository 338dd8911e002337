"""Calls with tensors of other dtypes and shapes, for functions that take any tensor.

    def send_any(context, unit, seed):
        return with_each(context, seed, lambda tensor: unit.send_recv(…, tensor))

All numbers are exact in their dtype, and so is the sum of a few ranks' tensors. Those
in int64 are too large for float64, so that a detour over it shows, also in a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.grading.kit.messages import finished_in_parts
from distlab.grading.runs import Runs, Scenario
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run

DTYPES = (torch.int64, torch.bfloat16, torch.float32)
SHAPES: tuple[tuple[int, ...], ...] = ((), (2, 1, 3), (0,))


def tensor_of(seed: int, rank: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """This rank's tensor; no other rank has one of its elements."""
    count = torch.Size(shape).numel()
    values = torch.arange(count) + 10 * rank + seed % 7 + 1
    if dtype == torch.int64:
        values += 1 << 57
    return values.to(dtype).reshape(tuple(shape))


def with_each(
    context: RankContext,
    seed: int,
    call: Callable[[Tensor], Any],
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    *,
    infinite: int | None = None,
) -> list[list[Tensor]]:
    """One `call` for each dtype, with another shape: before and after, or returned.

    On rank `infinite` the first number is inf, where the dtype has it.
    What `call` returns, if it is a tensor, stands for the tensor that was changed.
    Each call is reported before it is made: see `finished_with_each`.
    """
    seen = []
    for dtype, shape in zip(DTYPES, shapes, strict=True):
        context.report(str(dtype))
        before = tensor_of(seed, context.rank, dtype, shape)
        before = before.to(context.comm.device)
        if context.rank == infinite and dtype.is_floating_point:
            before.view(-1)[:1] = torch.inf
        tensor = before.clone()
        returned = call(tensor)
        seen.append([before, returned if isinstance(returned, Tensor) else tensor])
    return seen


def emptied(tensor: Tensor) -> Tensor:
    """The same tensor, its numbers to be overwritten: nan, which 0 × nan leaves nan."""
    return tensor.fill_(torch.nan) if tensor.dtype.is_floating_point else tensor


def finished_with_each(
    runs: Runs, scenario: Scenario, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> Run:
    """The finished run of a scenario that is one `with_each`.

    Raises:
        NotYetError: it did not finish; with the tensor at which it ended.
    """
    return finished_in_parts(
        runs, scenario, lambda part: _with_tensor(DTYPES[part], shapes[part])
    )


def _with_tensor(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """The situation: "with an int64 tensor of shape [2]"."""
    name = str(dtype).removeprefix("torch.")
    article = "an" if name[0] in "aeiou" else "a"
    return f"with {article} {name} tensor of shape {list(shape)}"


def expect_each(
    run: Run,
    expected: Callable[[list[Tensor]], Sequence[Tensor]],
    what: str,
    ranks: Sequence[int] = (),
) -> None:
    """After each call of `with_each` each rank has what `expected` makes of all ranks'.

    Or each of `ranks`, if only those are to be looked at.

    Raises:
        NotYetError: a rank has not.
    """
    for number in range(len(run.values[0])):
        before = [value[number][0] for value in run.values]
        after = [value[number][1] for value in run.values]
        wanted = expected(before)
        wrong = [
            rank
            for rank, (got, right) in enumerate(zip(after, wanted, strict=True))
            if not _same(got, right) and rank in (ranks or range(run.world_size))
        ]
        if not wrong:
            continue
        raise NotYetError(
            f"{_with_tensor(before[0].dtype, before[0].shape)}, {what} "
            f"{_flaw(wrong[0], after[wrong[0]], wanted[wrong[0]])}",
            evidence=[
                (
                    rank,
                    "wrong" if rank in wrong else "right",
                    f"got {_numbers(got)}   expected {_numbers(right)}",
                )
                for rank, (got, right) in enumerate(zip(after, wanted, strict=True))
                if not ranks or rank in ranks
            ],
        )


def _same(got: Tensor, right: Tensor) -> bool:
    alike = got.dtype == right.dtype and got.shape == right.shape
    return alike and torch.equal(got, right)


def _flaw(rank: int, got: Tensor, right: Tensor) -> str:
    """Say what a wrong tensor has, where it first differs from the right one."""
    if got.dtype != right.dtype:
        kinds = [str(one.dtype).removeprefix("torch.") for one in (got, right)]
        return f"is {kinds[0]} on rank {rank}, expected {kinds[1]}"
    if got.shape != right.shape:
        shapes = list(got.shape), list(right.shape)
        return f"has shape {shapes[0]} on rank {rank}, expected {shapes[1]}"
    pair = got.reshape(-1), right.reshape(-1)
    index = int((pair[0] != pair[1]).nonzero()[0])
    numbers = [f"{one[index].item():.3g}" for one in pair]
    if numbers[0] == numbers[1]:
        numbers = [f"{one[index].item()}" for one in pair]
    element = f"element {index} is " * (right.numel() > 1)
    told = f"{element}{numbers[0]} on rank {rank}, expected {numbers[1]}"
    if right.dtype == torch.int64 and torch.equal(got.float(), right.float()):
        return f"is rounded: {told}"
    return f"is wrong: {told}"


def _numbers(tensor: Tensor) -> str:
    flat = tensor.reshape(-1).tolist()
    return f"[{', '.join(map(str, flat[:3]))}{', …' * (len(flat) > 3)}]"
