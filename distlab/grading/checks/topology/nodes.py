"""Checks of task 3.7, `topology.hierarchical`: sums, and bytes on the slow links.

The groups are views of the rank's comm, so no new_group takes time; the all-reduce
argument belongs to the checks. Each rank's bytes are counted by destination.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.comm import Call, Comm, Wrapper
from distlab.grading.clause import clause
from distlab.grading.kit.lent import Lent, expect_own_memory, lend
from distlab.grading.kit.messages import expect_messages, finished_in_parts, numbers
from distlab.grading.kit.values import (
    Suspect,
    all_close,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run
from distlab.sim.plans.members import Members
from distlab.sim.plans.schedules import ring_all_reduce
from distlab.terminal import enumerated

COUNT = 29  # no number of rails or chunks divides it
TABLE = 30  # elements of a matrix of int64
NOT_FINITE = 12  # elements, where rank 0 has an inf and a nan
ITEM = 8  # bytes of a float64
MANY, MANY_IN_NODE = 64, 8  # simulated

Nodes = tuple[tuple[int, ...], ...]

EQUAL: dict[int, tuple[Nodes, ...]] = {
    6: (((0, 1, 2), (3, 4, 5)), ((0, 3), (1, 4), (2, 5))),
    4: (((0, 1), (2, 3)), ((3, 1), (0, 2))),
}
OTHER: dict[int, tuple[Nodes, ...]] = {
    6: (((0, 1, 2), (3,), (4, 5)), ((5, 4, 3, 2), (1, 0))),
    4: (((0,), (1, 2, 3)), ((0, 1, 2, 3),)),
    3: (((0, 1), (2,)), ((0,), (1,), (2,)), ((0, 1, 2),)),
    1: (((0,),),),
}


def settings(n: int, of_one_size: bool) -> list[tuple[Nodes, int]]:
    """Nodes and numbers of elements of the scenarios on n ranks."""
    lone = (tuple((rank,) for rank in range(n)),)
    every = EQUAL.get(n, lone) if of_one_size else others(n)
    sizes = [(nodes, COUNT) for nodes in every]
    return [*sizes, *((every[0], count) for count in (1, 0, TABLE, NOT_FINITE))]


def others(n: int) -> tuple[Nodes, ...]:
    """Nodes that are not all of one size; the kernel also asks for 5, 7 and 8."""
    return OTHER.get(n, (((0,), tuple(range(1, n))),))


def lent_of(seed: int, rank: int, count: int, device: torch.device) -> Lent:
    """A part of a larger tensor: TABLE elements are 5 × 6 int64, 1 has no dimension."""
    memory = numbers(seed, rank, count + 2)
    memory = (1000 * memory).long() if count == TABLE else memory
    if count == NOT_FINITE and rank == 0:
        memory[2], memory[8] = torch.inf, torch.nan
    if count == NOT_FINITE and rank == 1:
        memory.zero_()  # which is sent like any other tensor
    memory = memory.to(device)
    shape = {1: (), TABLE: (5, 6)}.get(count, (count,))
    return lend(memory[1:-1].view(shape), memory)


def told_of(count: int) -> str:
    """What that is, in words."""
    kinds = {
        1: "a 0-dimensional tensor",
        TABLE: "a matrix of int64",
        NOT_FINITE: "a tensor with a nan",
    }
    return kinds.get(count, f"{count} elements")


# ── on the ranks ────────────────────────────────────────────────────────────────────


class Ledger(Wrapper):
    """A comm that counts messages, and bytes by whom they go to."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.messages = 0
        self.sent_bytes = [0] * inner.world_size

    def _around(self, call: Call, proceed: Callable[[], Any]) -> Any:
        done = proceed()
        if call.dst is not None and isinstance(call.sent, Tensor):
            self.messages += 1
            self.sent_bytes[call.dst] += call.sent.nbytes
        return done


def levels_on(comm: Comm, unit: ModuleType, nodes: Sequence[Sequence[int]]) -> Any:
    """The unit's Levels, with groups that need no message."""
    num_rails = min(map(len, nodes))
    intra_node = Members(comm, next(node for node in nodes if comm.rank in node))
    local_rank = intra_node.rank
    rail = [node[local_rank] for node in nodes if local_rank < len(node)]
    inter_node = Members(comm, rail) if local_rank < num_rails else None
    return unit.Levels(intra_node, inter_node, num_rails)


def over_nodes(
    context: RankContext, unit: ModuleType, seed: int, of_one_size: bool
) -> list[dict[str, Any]]:
    """One all-reduce in each setting: what was there, what is, what was sent where."""
    found = []
    played = settings(context.world_size, of_one_size)
    for number, (nodes, count) in enumerate(played):
        context.report(named(nodes))
        found.append(_once(context, unit, seed + number, nodes, count))
    return found


def _once(
    context: RankContext,
    unit: ModuleType,
    seed: int,
    nodes: Sequence[Sequence[int]],
    count: int,
) -> dict[str, Any]:
    lent = lent_of(seed, context.rank, count, context.comm.device)
    ledger, summed = Ledger(context.comm), []

    def all_reduce(group: Comm, chunk: Tensor) -> None:
        summed.append(chunk.numel())
        ring_all_reduce(group, chunk)

    unit.hierarchical(levels_on(ledger, unit, nodes), lent.tensor, all_reduce)
    near = set(next(node for node in nodes if context.rank in node))
    intra_node = sum(b for dst, b in enumerate(ledger.sent_bytes) if dst in near)
    return {
        **lent.left(),
        "summed": len(summed),
        "intra_node": intra_node,
        "inter_node": sum(ledger.sent_bytes) - intra_node,
    }


def on_many(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """One all-reduce on nodes of eight: bytes by destination, and whether it is right.

    The elements are integers, so the sum has no rounding.
    """
    n, k = context.world_size, MANY_IN_NODE
    nodes = [range(start, start + k) for start in range(0, n, k)]
    ledger = Ledger(context.comm)
    tensor = torch.full((2 * n,), 1.0 + context.rank, dtype=torch.float64)
    unit.hierarchical(levels_on(ledger, unit, nodes), tensor, ring_all_reduce)
    start = context.rank // k * k
    intra_node = sum(ledger.sent_bytes[start : start + k])
    return {
        "is_right": bool((tensor == n * (n + 1) / 2).all()),
        "intra_node": intra_node,
        "inter_node": sum(ledger.sent_bytes) - intra_node,
    }


# ── values ──────────────────────────────────────────────────────────────────────────


def named(nodes: Nodes) -> str:
    """In words: 0 1 | 2 3."""
    return " | ".join(" ".join(map(str, node)) for node in nodes)


def on_nodes(nodes: Nodes) -> str:
    """As a sentence says it: "on nodes [0, 1] and [2, 3]"."""
    plural = "s" * (len(nodes) > 1)
    return f"on node{plural} {enumerated([str(list(node)) for node in nodes])}"


def _suspects(nodes: Nodes, before: list[Tensor]) -> list[Suspect]:
    by_rank = {rank: node for node in nodes for rank in node}
    own = [sum_of([before[r] for r in by_rank[rank]]) for rank in range(len(before))]
    total = sum_of(before)
    found = [
        Suspect(
            slug="nodes-never-meet",
            values=own,
            sentence=f"{on_nodes(nodes)}, each rank has only the sum of its own "
            "node, expected the sum over all nodes",
            rule="after the intra-node stage comes the inter-node all-reduce",
        ),
        Suspect(
            slug="not-in-place",
            values=before,
            sentence=f"{on_nodes(nodes)}, hierarchical left the caller's tensor "
            "unchanged, expected the sum in it",
            rule="write into the argument; the caller does not see copies",
        ),
    ]
    sizes = {len(node) for node in nodes}
    if len(sizes) == 1:
        k = sizes.pop()
        found.append(
            Suspect(
                slug="summed-twice",
                values=same_everywhere(k * total, len(before)),
                sentence=f"{on_nodes(nodes)}, every rank has {k} times the sum, as if "
                "two intra-node stages added: expected it once",
                rule="the last stage copies, and adds nothing",
            )
        )
    return found


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """The sum."""
    return torch.stack(list(tensors)).sum(0)


def _only_own_chunks(nodes: Nodes, before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether each chunk is right on the ranks of its rail, and only there."""
    num_rails = min(map(len, nodes))
    chunks = sum_of(before).tensor_split(num_rails)
    if num_rails == 1 and max(map(len, nodes)) == 1:
        return False
    local_ranks = {rank: i for node in nodes for i, rank in enumerate(node)}
    right = [
        [
            all_close([got], [chunk])
            for got, chunk in zip(tensor.tensor_split(num_rails), chunks, strict=True)
        ]
        for tensor in after
    ]
    return all(
        row == [rail == local_ranks[rank] for rail in range(num_rails)]
        for rank, row in enumerate(right)
    )


def _finished(runs: Runs, of_one_size: bool) -> Run:
    """The run; if it failed, with the nodes on which it did."""

    def situation(part: int) -> str:
        nodes, count = settings(runs.world_size, of_one_size)[part]
        return f"with {told_of(count)} " * (count != COUNT) + on_nodes(nodes)

    return finished_in_parts(runs, over_nodes, situation, of_one_size=of_one_size)


def _judge(of_one_size: bool, runs: Runs) -> None:
    run = _finished(runs, of_one_size)
    expect_messages(run, "a sum over the ranks needs messages")
    n = runs.world_size
    for number, (nodes, count) in enumerate(settings(n, of_one_size)):
        told = [value[number] for value in run.values]
        before = [part["before"] for part in told]
        after = [part["after"] for part in told]
        total = same_everywhere(sum_of(before), n)
        if count == COUNT and _only_own_chunks(nodes, before, after):
            raise NotYetError(
                f"{on_nodes(nodes)}, each rank holds the sum only in its rail's chunk, "
                "expected it in every chunk",
                slug="way-back-missing",
                rule="in the last stage, a rank sends its chunk to its node's ranks",
            )
        of = f" of {told_of(count)}" * (count != COUNT)
        what = f"hierarchical{of} {on_nodes(nodes)}"
        expect_own_memory(run, told, what)
        what = f"after {what}, the tensor"
        expect_values(
            after,
            total,
            what=what,
            suspects=partial(_suspects, nodes, before),
            parts=before,
        )
        expect_equal_bits(
            after,
            what=what,
            slug="own-order-sum",
            rule="one rank adds, and the other ranks get a copy of its sum",
        )


every_rank_has_the_sum = clause(
    "topology.hierarchical",
    "C1",
    worlds=(4, 6),
    runs=[on_ranks(over_nodes, of_one_size=True)],
)(partial(_judge, True))
clause(
    "topology.hierarchical",
    "C2",
    worlds=(3, 4, 6, 1),
    runs=[on_ranks(over_nodes, of_one_size=False)],
)(partial(_judge, False))
