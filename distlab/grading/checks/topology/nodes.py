"""Checks of task 3.7, `topology.hierarchical`: sums, and bytes on the slow links.

The groups are views of the rank's comm, so no new_group takes time; the all-reduce
argument belongs to the checks. Each rank's bytes are counted by destination.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.comm import Call, Comm, Wrapper
from distlab.grading.clause import clause
from distlab.grading.kit.clause_order import judged_after
from distlab.grading.kit.messages import expect_messages, numbers
from distlab.grading.kit.values import (
    Suspect,
    all_close,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, in_virtual_time, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import Evidence
from distlab.sim.plans.members import Members
from distlab.sim.plans.schedules import ring_all_reduce

COUNT = 29  # no number of rails or chunks divides it
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
    return [*sizes, *((every[0], count) for count in (1, 0))]


def others(n: int) -> tuple[Nodes, ...]:
    """Nodes that are not all of one size; the kernel also asks for 5, 7 and 8."""
    return OTHER.get(n, (((0,), tuple(range(1, n))),))


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
        found.append(_once(context, unit, seed + number, nodes, count))
    return found


def _once(
    context: RankContext,
    unit: ModuleType,
    seed: int,
    nodes: Sequence[Sequence[int]],
    count: int,
) -> dict[str, Any]:
    before = numbers(seed, context.rank, count)
    tensor = before.clone().to(context.comm.device)
    ledger = Ledger(context.comm)
    unit.hierarchical(levels_on(ledger, unit, nodes), tensor, ring_all_reduce)
    near = set(next(node for node in nodes if context.rank in node))
    intra_node = sum(b for dst, b in enumerate(ledger.sent_bytes) if dst in near)
    return {
        "before": before,
        "after": tensor.cpu(),
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


def _suspects(nodes: Nodes, before: list[Tensor]) -> list[Suspect]:
    by_rank = {rank: node for node in nodes for rank in node}
    own = [sum_of([before[r] for r in by_rank[rank]]) for rank in range(len(before))]
    total = sum_of(before)
    found = [
        Suspect(
            slug="nodes-never-meet",
            values=own,
            sentence=f"nodes {named(nodes)}: each node has only the sum of its ranks",
            rule="after the intra-node stage comes the inter-node all-reduce",
        ),
        Suspect(
            slug="not-in-place",
            values=before,
            sentence=f"nodes {named(nodes)}: the argument is unchanged",
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
                sentence=f"nodes {named(nodes)}: expected the sum, got {k} times the "
                "sum: two intra-node stages add",
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


def _judge(runs: Runs, of_one_size: bool) -> None:
    run = runs.finished(over_nodes, of_one_size=of_one_size)
    expect_messages(run, "a sum over the ranks needs messages")
    n = runs.world_size
    for number, (nodes, count) in enumerate(settings(n, of_one_size)):
        told = [value[number] for value in run.values]
        before = [part["before"] for part in told]
        after = [part["after"] for part in told]
        total = same_everywhere(sum_of(before), n)
        if count == COUNT and _only_own_chunks(nodes, before, after):
            raise NotYetError(
                f"nodes {named(nodes)}: each chunk is correct only on the ranks of its "
                "rail",
                slug="way-back-missing",
                rule="in the last stage, a rank sends its chunk to its node's ranks",
            )
        what = f"nodes {named(nodes)}, {count} elements: the tensor"
        expect_values(
            after,
            total,
            what=what,
            suspects=partial(_suspects, nodes, before),
            rule="after each stage: which ranks' tensors are in this chunk?",
        )
        expect_equal_bits(
            after,
            what=what,
            slug="own-order-sum",
            rule="one rank adds, and the other ranks get a copy of its sum",
        )


@clause(
    "topology.hierarchical",
    "C1",
    worlds=(4, 6),
    runs=[on_ranks(over_nodes, of_one_size=True)],
)
def every_rank_has_the_sum(runs: Runs) -> str | None:
    """V and X: nodes of one size, with consecutive ranks and with others."""
    _judge(runs, True)
    return None


@clause(
    "topology.hierarchical",
    "C2",
    worlds=(3, 4, 6, 1),
    runs=[on_ranks(over_nodes, of_one_size=False)],
)
def any_nodes(runs: Runs) -> str | None:
    """V and X: nodes of different sizes, nodes of one rank, a single node."""
    _judge(runs, False)
    return None


# ── bytes ───────────────────────────────────────────────────────────────────────────


def most_inter_node(count: int, p: int, num_rails: int) -> int:
    """Bytes of a ring all-reduce of the largest chunk, by the element."""
    chunk = ceil(count / num_rails)
    return 2 * (p - 1) * ceil(chunk / p) * ITEM


ON_MANY = in_virtual_time(on_many, MANY)


@clause(
    "topology.hierarchical",
    "C3",
    worlds=(4, 6),
    runs=[on_ranks(over_nodes, of_one_size=True)],
    later=[ON_MANY],
)
def few_bytes_inter_node(runs: Runs) -> str | None:
    """B: by rank, here and on simulated nodes."""
    run = runs.finished(over_nodes, of_one_size=True)
    for number, (nodes, count) in enumerate(settings(runs.world_size, True)):
        num_rails = min(map(len, nodes))
        most = most_inter_node(count, len(nodes), num_rails)
        sent = [value[number]["inter_node"] for value in run.values]
        if max(sent) > most:
            raise _too_much(named(nodes), sent, most, num_rails, count * ITEM)
    if runs.world_size != 4:
        return None
    told = runs.simulated(ON_MANY)["values"]
    p, chunk = MANY // MANY_IN_NODE, 2 * MANY // MANY_IN_NODE
    most = most_inter_node(chunk, p, 1)
    sent = [value["inter_node"] for value in told]
    with judged_after(every_rank_has_the_sum, runs, "C1"):
        if not all(value["is_right"] for value in told):
            raise NotYetError(
                f"{MANY} simulated ranks on nodes of {MANY_IN_NODE}: the sum is wrong",
                rule="trace a node of more than two ranks by hand",
            )
    if max(sent) > most:
        where = f"{MANY} simulated ranks on nodes of {MANY_IN_NODE}"
        raise _too_much(where, sent, most, MANY_IN_NODE, 2 * MANY * ITEM)
    flat = 2 * (MANY - 1) * 2 * ITEM  # last rank of a node, in a ring over all ranks
    return (
        f"{MANY} simulated ranks: inter-node at most {max(sent)} bytes per rank; in a "
        f"ring over all ranks, {flat} for the last rank of a node"
    )


def _too_much(
    where: str, sent: list[int], most: int, num_rails: int, num_bytes: int
) -> NotYetError:
    busy = [rank for rank, amount in enumerate(sent) if amount > most]
    slug, words = "", ""
    if num_rails > 1 and len(busy) < len(sent) and set(sent) - {0} == {max(sent)}:
        slug, words = "leader-carries-all", ": the other ranks of its node send nothing"
    elif num_rails > 1 and len(busy) == len(sent):
        slug = "whole-tensor-inter-node" if max(sent) > 0.9 * num_bytes else ""
        words = ", and so do all other ranks" if slug else ""
    return NotYetError(
        f"nodes {where}: rank {busy[0]} sends {sent[busy[0]]} bytes inter-node, where "
        f"{most} are enough{words}",
        slug=slug,
        evidence=tuple(
            Evidence(
                rank=rank,
                state="much" if amount > most else "right",
                text=f"{amount} bytes inter-node, of a tensor of {num_bytes}",
            )
            for rank, amount in enumerate(sent[:8])
        ),
        rule="each rank sends only the chunk of its rail to other nodes",
    )


@clause(
    "topology.hierarchical",
    "C4",
    worlds=(6, 4),
    runs=[on_ranks(over_nodes, of_one_size=True)],
)
def few_bytes_intra_node(runs: Runs) -> str | None:
    """B: a reduce-scatter and an all-gather, where the nodes have one size."""
    run = runs.finished(over_nodes, of_one_size=True)
    for number, (nodes, count) in enumerate(settings(runs.world_size, True)):
        k = len(nodes[0])
        most = 2 * (k - 1) * ceil(count / k) * ITEM
        sent = [value[number]["intra_node"] for value in run.values]
        if max(sent) > most:
            rank = sent.index(max(sent))
            raise NotYetError(
                f"nodes {named(nodes)}: rank {rank} sends {max(sent)} bytes "
                f"intra-node, where {most} are enough",
                slug="whole-tensor-intra-node",
                evidence=tuple(
                    Evidence(
                        rank=rank,
                        state="much" if amount > most else "right",
                        text=f"{amount} bytes of a tensor of {count * ITEM}",
                    )
                    for rank, amount in enumerate(sent)
                ),
                rule="before the last stage, a rank needs the sum of one chunk only",
            )
    return None
