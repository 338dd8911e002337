"""Checks of task 1.4, `collectives.all_reduce`: the sum, the same bits on all ranks."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.grading.clause import clause
from distlab.grading.kit.any_tensor import (
    expect_each,
    finished_with_each,
    with_each,
)
from distlab.grading.kit.messages import (
    WORLDS,
    calls_of_each,
    expect_bytes,
    expect_messages,
    numbers,
    received,
    with_lines,
)
from distlab.grading.kit.values import (
    Suspect,
    close,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence


def reduce_once(
    context: RankContext, unit: ModuleType, seed: int, kind: str = "uneven"
) -> dict[str, Any]:
    """Sum a tensor: no default shape or dtype fits all kinds.

    "uneven" is float64, from 1 to 1,000,000: the order of summation shows in the bits.
    "small" is 1, 10, 100, … by rank: its digits show what was added how often.
    "plain" is float32, after another call.
    """
    if kind == "uneven":
        tensor = numbers(seed, context.rank, 64)
        tensor *= 10.0 ** torch.arange(64).remainder(7)
    elif kind == "small":
        tensor = torch.tensor([10.0**context.rank], dtype=torch.float64)
    else:
        # Another call came before, with the same shape: nothing of it may be left.
        other = numbers(seed, context.rank, 6).reshape(2, 3)
        unit.all_reduce(context.comm, other.to(context.comm.device))
        tensor = numbers(seed, context.rank, 6, "float32").reshape(2, 3)
    tensor = tensor.to(context.comm.device)
    before = tensor.clone()
    returned = unit.all_reduce(context.comm, tensor)
    is_tensor = isinstance(returned, Tensor)
    return {
        "before": before,
        "after": tensor,
        "returned": returned.detach().clone() if is_tensor else None,
    }


def reduce_any(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """Sums of tensors of other dtypes and shapes; rank 1 has an inf."""

    def call(tensor: Tensor) -> None:
        unit.all_reduce(context.comm, tensor)

    return with_each(context, seed, call, infinite=1)


SECOND_CALL = "in two calls, the first with float64 and the second with float32"
OF_ANY = on_ranks(reduce_any)
IN_DIGITS = on_ranks(reduce_once, kind="small")


class Sums:
    """What each rank had, has and returned; and what it should have."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.before: list[Tensor] = [value["before"] for value in run.values]
        self.after: list[Tensor] = [value["after"] for value in run.values]
        self.returned: list[Any] = [value["returned"] for value in run.values]
        self.total = torch.stack([before.double() for before in self.before]).sum(0)
        single = self.before[0].dtype == torch.float32
        self.tolerance = 1e-5 if single else 1e-12

    def right(self, value: object) -> bool:
        """Whether it is the sum, up to rounding."""
        return close(value, self.total, self.tolerance)

    def outside(self) -> list[int]:
        """The ranks that have the sum, but not in the caller's tensor; if all have it.

        Those whose tensor is still as it was, although they received a message or
        returned the sum. No rank, as soon as one holds anything else but the sum.
        """
        wrong = [rank for rank, now in enumerate(self.after) if not self.right(now)]
        for rank in wrong:
            changed = not torch.equal(self.after[rank], self.before[rank])
            has_heard = received(self.run.ranks[rank])
            if changed or not (has_heard or self.right(self.returned[rank])):
                return []
        return wrong


def _kinds(world_size: int) -> list[RunSpec]:
    second = on_ranks(reduce_once, kind="plain").when(SECOND_CALL)
    return [on_ranks(reduce_once, kind="uneven"), *[second] * (world_size == 3)]


def _sums(runs: Runs) -> list[Sums]:
    return [Sums(runs.finished(spec)) for spec in _kinds(runs.world_size)]


def _and_any(world_size: int) -> list[RunSpec]:
    return _kinds(world_size) + [OF_ANY] * (world_size == 3)


@clause("collectives.all_reduce", "C1", worlds=WORLDS, runs=_and_any, later=[IN_DIGITS])
def sum_everywhere(runs: Runs) -> str | None:
    """What each rank ends up with is the sum, and the same bits."""
    for sums in _sums(runs):
        is_right = all(map(sums.right, sums.after))
        expect_messages(
            sums.run,
            "every rank has the sum, but not through comm"
            if is_right
            else "the tensors don't hold the sum over the ranks",
        )
        if sums.outside():
            raise NotJudgedError("the sum is not in the caller's tensor: see C2")
        try:
            expect_values(
                sums.after,
                same_everywhere(sums.total, runs.world_size),
                what="the tensor after all_reduce",
                tolerance=sums.tolerance,
                suspects=_wrong_sums(sums.before, sums.total),
                parts=sums.before,
            )
        except NotYetError as failure:
            if failure.slug:
                raise
            lines = _in_small_numbers(runs) or failure.evidence
            raise failure.but(evidence=with_lines(lines, sums.run)) from failure
        expect_equal_bits(
            sums.after,
            what="the sum",
            slug="own-order-sum",
            rule="let one rank add, and copy its result to the others: a + b + c "
            "rounds differently from c + b + a",
        )
        # Each number but one's own is added once, and each sum but one is received.
        least = 2 * (runs.world_size - 1) * sums.before[0].nbytes
        expect_bytes(sums.run, least, "the sum is right on every rank")
    if runs.world_size == 3:
        expect_each(
            finished_with_each(runs, reduce_any),
            lambda before: same_everywhere(sum(before[1:], before[0]), len(before)),
            "the sum",
        )
    return None


@clause("collectives.all_reduce", "C2", worlds=WORLDS, runs=_kinds)
def in_place(runs: Runs) -> str | None:
    """The caller's own tensor holds the sum."""
    n = runs.world_size
    played = _sums(runs)
    for sums in played:
        outside = sums.outside()
        if outside:
            raise NotYetError(
                _where_the_sum_is(sums, outside),
                slug="not-in-place",
                evidence=calls_of_each(sums.run),
                rule="write into the argument: tensor += … or tensor.copy_(…); "
                "tensor = … only makes a new tensor",
            )
        if not all(sums.right(now) for now in sums.after):
            raise NotJudgedError("no rank's sum is right: see C1")
    halves = [len(record.calls()) for record in played[0].run.ranks]
    return (
        f"n = {n}: rank 0 takes part in {halves[0]} messages, rank {n - 1} in "
        f"{halves[-1]}; with n = 1,000: 1,998 and 2"
    )


def _in_small_numbers(runs: Runs) -> tuple[Evidence, ...]:
    """The same mistake with 1, 10, 100, …, where one can see what was added up."""
    run = runs.ended(IN_DIGITS)
    if run.outcome != "finished":
        return ()
    sums = Sums(run)
    if all(sums.right(now) for now in sums.after):
        return ()
    return tuple(
        Evidence(
            rank,
            "right" if sums.right(now) else "wrong",
            f"had {had.item():g}   got {now.sum().item():g}   "
            f"expected {sums.total.item():g}",
        )
        for rank, (had, now) in enumerate(zip(sums.before, sums.after, strict=True))
    )


def _where_the_sum_is(sums: Sums, outside: list[int]) -> str:
    n = sums.run.world_size
    on = "every rank" if len(outside) == n else f"rank {outside[0]}"
    unchanged = f"the caller's tensor is unchanged on {on}"
    if all(sums.right(sums.returned[rank]) for rank in outside):
        return f"all_reduce returned the sum, but {unchanged}, expected the sum in it"
    return f"{unchanged}: the received values went into another tensor"


def _wrong_sums(before: list[Tensor], total: Tensor) -> list[Suspect]:
    n = len(before)
    first = before[0].double()
    return [
        Suspect(
            slug="",
            values=[total, *before[1:]],
            sentence="rank 0 has the sum, but the other ranks still have their own "
            "tensors, expected the sum on every rank",
            rule="the second half is missing: every rank gets the result",
        ),
        Suspect(
            slug="",
            values=before,
            sentence="every rank's tensor is unchanged, expected in it the sum of all "
            "tensors",
            rule="write into the argument: tensor += … or tensor.copy_(…)",
        ),
        Suspect(
            slug="",
            values=same_everywhere(before[0], n),
            sentence="every rank has rank 0's tensor, with nothing added to it, "
            "expected the sum of all tensors",
            rule="the first half is missing: one rank adds all tensors",
        ),
        Suspect(
            slug="last-write-wins",
            values=same_everywhere(before[-1], n),
            sentence=f"every rank has rank {n - 1}'s tensor, as if each received "
            "tensor had replaced the sum, expected the sum of all tensors",
            rule="receive into a receive buffer, then add the buffer",
        ),
        Suspect(
            slug="own-value-missing",
            values=same_everywhere(total - first, n),
            sentence="every rank has the sum without rank 0's own tensor, expected "
            f"all {n} ranks' tensors in it",
            rule="start from rank 0's own tensor, then add the others",
        ),
        Suspect(
            slug="own-value-twice",
            values=same_everywhere(total + first, n),
            sentence="every rank's sum contains rank 0's own tensor twice, expected "
            "each rank's tensor once",
            rule="each rank's tensor counts exactly once",
        ),
        Suspect(
            slug="mean-not-sum",
            values=same_everywhere(total / n, n),
            sentence=f"every rank has the mean, the sum divided by {n}, expected the "
            "sum",
            rule="all_reduce returns the sum; the caller divides if it needs the mean",
        ),
    ]
