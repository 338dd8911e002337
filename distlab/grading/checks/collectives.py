"""Checks of the unit `collectives`: 1.3 and 1.4; see pairs.py for the rest.

Values, in the caller's own tensor, the same bits on all ranks, and how many messages.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.grading.bench import Bench, Implementation
from distlab.grading.checks.gather_scatter import gather_once, scatter_once
from distlab.grading.checks.messages import (
    WORLDS,
    calls_of_each,
    expect_messages,
    numbers,
    received,
)
from distlab.grading.checks.pairs import exchange_once, pass_once
from distlab.grading.checks.tree_broadcast import tree_once
from distlab.grading.clause import clause
from distlab.grading.oracles import (
    Suspect,
    all_close,
    close,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence

__all__ = [
    "broadcast_once",
    "exchange_once",
    "gather_once",
    "pass_once",
    "reduce_once",
    "scatter_once",
    "tree_once",
]

# ── 1.3 broadcast ───────────────────────────────────────────────────────────────────


def broadcast_once(
    context: RankContext, unit: ModuleType, seed: int, src: int, again: bool = False
) -> dict[str, Any]:
    """One broadcast of a 2 × 3 tensor; with `again`, after one of another dtype."""
    if again:
        other = numbers(seed + 1, context.rank, 6, "float32").reshape(2, 3)
        unit.broadcast(context.comm, other, src)
    tensor = numbers(seed, context.rank, 6).reshape(2, 3)
    before = tensor.clone()
    unit.broadcast(context.comm, tensor, src)
    return {"before": before, "after": tensor}


def _sources(world_size: int) -> tuple[int, ...]:
    """All with three ranks, one that is neither 0 nor obvious with other numbers."""
    # A run each: two broadcasts in one run would make a hang of the first one hard to
    # read, because some ranks would wait in the second already.
    return (1, 0, 2) if world_size == 3 else (world_size // 2,)


def _broadcast(impl: Implementation, cluster: Bench, src: int) -> Run:
    """The finished run; if it did not finish, first of all: did the right rank send?"""
    try:
        return cluster.run(impl, broadcast_once, src=src)
    except NotYetError as failure:
        run = cluster.observe(impl, broadcast_once, src=src)
        first = [record.calls()[:1] for record in run.ranks]
        sends = [bool(c) and c[0]["op"] in ("send", "isend") for c in first]
        if src == 0 or not sends[0] or sends[src]:
            raise
        raise NotYetError(
            f"src is {src}, but rank 0 is the one that sends",
            slug="source-ignored",
            evidence=failure.evidence,
            rule="the source is the argument src: branch on comm.rank == src",
            kind=failure.kind,
            fatal=True,
            output=failure.output,
        ) from failure


@clause("collectives.broadcast", "C1", worlds=WORLDS)
def everyone_has_it(impl: Implementation, cluster: Bench) -> str | None:
    """V: after a broadcast from src every rank has src's values, for every src."""
    n = cluster.world_size
    for src in _sources(n):
        run = _broadcast(impl, cluster, src)
        expect_messages(run, "every rank's tensor is as it was")
        before = [value["before"] for value in run.values]
        arrived = [received(record) for record in run.ranks if record.rank != src]
        expect_values(
            [value["after"] for value in run.values],
            same_everywhere(before[src], n),
            what=f"the tensor after a broadcast from rank {src}",
            suspects=[
                Suspect(
                    slug="not-in-place" if all(arrived) else "",
                    values=before,
                    sentence="every rank's tensor is as it was before",
                    rule="receive into the tensor you were given",
                ),
                Suspect(
                    slug="source-ignored",
                    values=same_everywhere(before[0], n),
                    sentence=f"src is {src}, but every rank has rank 0's values",
                    rule="the source is the argument src, not always rank 0",
                ),
            ],
            rule="src sends to everyone else; everyone else receives from src",
        )
    if n == 3:
        run = cluster.run(impl, broadcast_once, src=1, again=True)
        expect_values(
            [value["after"] for value in run.values],
            same_everywhere(run.values[1]["before"], n),
            what="after a second call in the same process the tensor",
            rule="keep nothing from one call to the next",
        )
    return None


@clause("collectives.broadcast", "C2", worlds=(3, 2, 4, 7))
def messages_of_broadcast(impl: Implementation, cluster: Bench) -> str | None:
    """B: n - 1 messages, since each rank but src receives once."""
    n = cluster.world_size
    for src in _sources(n):
        run = cluster.run(impl, broadcast_once, src=src)
        total = sum(record.messages for record in run.ranks)
        if total < n - 1:
            sent = same_everywhere(run.values[src]["before"], n)
            if all_close([value["after"] for value in run.values], sent):
                raise NotYetError(
                    f"every rank has it after {total} messages; {n - 1} are needed: "
                    "it came by another way",
                    evidence=calls_of_each(run),
                    rule="only a message of comm counts",
                )
            raise NotJudgedError("some ranks were not reached: see C1")
        if total > n - 1:
            raise NotYetError(
                f"{total} messages for a broadcast on {n} ranks; {n - 1} are enough",
                slug="extra-messages",
                evidence=calls_of_each(run),
                rule="every rank but src receives once",
            )
    return f"n = {n}: {n - 1} messages"


# ── 1.4 all_reduce ──────────────────────────────────────────────────────────────────


def reduce_once(
    context: RankContext, unit: ModuleType, seed: int, kind: str = "uneven"
) -> dict[str, Any]:
    """Sum a tensor: no default shape or dtype fits both kinds.

    "uneven" is float64, from 1 to 1,000,000: the order of summation shows in the bits.
    "small" is 1, 10, 100, … by rank: its digits show what was added how often.
    """
    if kind == "uneven":
        tensor = numbers(seed, context.rank, 64)
        tensor *= 10.0 ** torch.arange(64).remainder(7)
    elif kind == "small":
        tensor = torch.tensor([10.0**context.rank], dtype=torch.float64)
    else:
        # Another call came before, with the same shape: nothing of it may be left.
        unit.all_reduce(context.comm, numbers(seed, context.rank, 6).reshape(2, 3))
        tensor = numbers(seed, context.rank, 6, "float32").reshape(2, 3)
    before = tensor.clone()
    returned = unit.all_reduce(context.comm, tensor)
    is_tensor = isinstance(returned, Tensor)
    return {
        "before": before,
        "after": tensor,
        "returned": returned.detach().clone() if is_tensor else None,
    }


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


def _sums(impl: Implementation, cluster: Bench) -> list[Sums]:
    kinds = ("uneven", "plain") if cluster.world_size == 3 else ("uneven",)
    return [Sums(cluster.run(impl, reduce_once, kind=kind)) for kind in kinds]


@clause("collectives.all_reduce", "C1", worlds=WORLDS)
def sum_everywhere(impl: Implementation, cluster: Bench) -> str | None:
    """V and X: what each rank ends up with is the sum, and the same bits."""
    for sums in _sums(impl, cluster):
        expect_messages(sums.run, "the tensors are not the sum over the ranks")
        if sums.outside():
            raise NotJudgedError("the sum is not in the caller's tensor: see C2")
        try:
            expect_values(
                sums.after,
                same_everywhere(sums.total, cluster.world_size),
                what="the sum",
                tolerance=sums.tolerance,
                suspects=_wrong_sums(sums.before, sums.total),
                rule="add up all ranks' tensors, each exactly once",
            )
        except NotYetError as failure:
            if not failure.slug:
                failure.evidence = _in_small_numbers(impl, cluster) or failure.evidence
            raise
        expect_equal_bits(
            sums.after,
            what="the sum",
            slug="own-order-sum",
            rule="let one rank add, and copy its result to the others: a + b + c "
            "rounds differently from c + b + a",
        )
    return None


@clause("collectives.all_reduce", "C2", worlds=WORLDS)
def in_place(impl: Implementation, cluster: Bench) -> str | None:
    """V: the caller's own tensor holds the sum."""
    n = cluster.world_size
    for sums in _sums(impl, cluster):
        outside = sums.outside()
        if outside:
            raise NotYetError(
                _where_the_sum_is(sums, outside),
                slug="not-in-place",
                evidence=calls_of_each(sums.run),
                rule="write into the tensor you were given: tensor += … or "
                "tensor.copy_(…); tensor = … makes a new one",
            )
        if not all(sums.right(now) for now in sums.after):
            raise NotJudgedError("no rank's sum is right: see C1")
    halves = [len(record.calls()) for record in sums.run.ranks]
    return (
        f"n = {n}: rank 0 takes part in {halves[0]} messages, rank {n - 1} in "
        f"{halves[-1]}; with n = 1,000: 1,998 and 2"
    )


def _in_small_numbers(impl: Implementation, cluster: Bench) -> tuple[Evidence, ...]:
    """The same mistake with 1, 10, 100, …, where one can see what was added up."""
    run = cluster.observe(impl, reduce_once, kind="small")
    if run.outcome != "finished":
        return ()
    sums = Sums(run)
    if all(sums.right(now) for now in sums.after):
        return ()
    return tuple(
        Evidence(
            rank=rank,
            state="right" if sums.right(now) else "wrong",
            text=f"had {had.item():g}   got {now.sum().item():g}   "
            f"expected {sums.total.item():g}",
        )
        for rank, (had, now) in enumerate(zip(sums.before, sums.after, strict=True))
    )


def _where_the_sum_is(sums: Sums, outside: list[int]) -> str:
    n = sums.run.world_size
    on = "every rank" if len(outside) == n else f"rank {outside[0]}"
    unchanged = f"the caller's tensor is unchanged on {on}"
    if all(sums.right(sums.returned[rank]) for rank in outside):
        return f"your return value is right, but {unchanged}"
    return f"{unchanged}: what arrived there went into another one"


def _wrong_sums(before: list[Tensor], total: Tensor) -> list[Suspect]:
    n = len(before)
    first = before[0].double()
    return [
        Suspect(
            slug="",
            values=[total, *before[1:]],
            sentence="rank 0 has the sum, the other ranks still have their own tensor",
            rule="the second half is missing: everybody gets the result",
        ),
        Suspect(
            slug="",
            values=before,
            sentence="every rank's tensor is as it was before",
            rule="write into the tensor you were given: tensor += … or tensor.copy_(…)",
        ),
        Suspect(
            slug="",
            values=same_everywhere(before[0], n),
            sentence="every rank has rank 0's tensor: nothing was added to it",
            rule="the first half is missing: one rank adds everything up",
        ),
        Suspect(
            slug="last-write-wins",
            values=same_everywhere(before[-1], n),
            sentence=f"every rank has rank {n - 1}'s tensor: what arrived replaced "
            "the sum instead of being added to it",
            rule="receive into a second tensor, then add it",
        ),
        Suspect(
            slug="own-value-missing",
            values=same_everywhere(total - first, n),
            sentence="rank 0's own tensor is missing from the sum",
            rule="start from your own values, then add the others'",
        ),
        Suspect(
            slug="own-value-twice",
            values=same_everywhere(total + first, n),
            sentence="rank 0's own tensor is in the sum twice",
            rule="each rank's tensor counts exactly once",
        ),
        Suspect(
            slug="mean-not-sum",
            values=same_everywhere(total / n, n),
            sentence=f"every rank has the mean, not the sum: divided by {n}",
            rule="all_reduce sums; who wants the mean divides afterwards",
        ),
    ]
