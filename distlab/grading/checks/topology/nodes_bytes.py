"""Checks of task 3.7, `topology.hierarchical`: bytes on the slow links, and within."""

from __future__ import annotations

from math import ceil

from distlab.grading.checks.topology.nodes import (
    ITEM,
    MANY,
    MANY_IN_NODE,
    every_rank_has_the_sum,
    on_many,
    on_nodes,
    over_nodes,
    settings,
)
from distlab.grading.clause import clause, judged_after
from distlab.grading.runs import Runs, in_virtual_time, on_ranks
from distlab.grading.verdict import NotYetError


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
    """By rank, here and on simulated nodes."""
    run = runs.finished(over_nodes, of_one_size=True)
    for number, (nodes, count) in enumerate(settings(runs.world_size, True)):
        num_rails = min(map(len, nodes))
        most = most_inter_node(count, len(nodes), num_rails)
        sent = [value[number]["inter_node"] for value in run.values]
        if max(sent) > most:
            raise _too_much(on_nodes(nodes), sent, most, num_rails, count * ITEM)
        if len(nodes) > 1 and not any(value[number]["summed"] for value in run.values):
            raise NotYetError(
                f"{on_nodes(nodes)}, no rank called the function passed as "
                "`all_reduce`, expected it to sum the chunks across the nodes",
                rule="inter-node: all_reduce(levels.inter_node, chunk)",
            )
    if runs.world_size != 4:
        return None
    told = runs.simulated(ON_MANY)["values"]
    p, chunk = MANY // MANY_IN_NODE, 2 * MANY // MANY_IN_NODE
    most = most_inter_node(chunk, p, 1)
    sent = [value["inter_node"] for value in told]
    with judged_after(every_rank_has_the_sum, runs, "C1"):
        if not all(value["is_right"] for value in told):
            raise NotYetError(
                f"on {MANY} simulated ranks in nodes of {MANY_IN_NODE}, a rank has a "
                f"wrong sum, expected {MANY * (MANY + 1) // 2} in each element",
                rule="trace a node of more than two ranks by hand",
            )
    if max(sent) > most:
        where = f"on {MANY} simulated ranks in nodes of {MANY_IN_NODE}"
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
        slug = "leader-carries-all"
        words = ", and the others of its node none"
    elif num_rails > 1 and len(busy) == len(sent):
        slug = "whole-tensor-inter-node" if max(sent) > 0.9 * num_bytes else ""
        words = ", and so did all other ranks" if slug else ""
    return NotYetError(
        f"{where}, rank {busy[0]} sent {sent[busy[0]]} bytes to other nodes{words}, "
        f"expected at most {most}",
        slug=slug,
        evidence=[
            (
                rank,
                "much" if amount > most else "right",
                f"{amount} bytes inter-node, of a tensor of {num_bytes}",
            )
            for rank, amount in enumerate(sent[:8])
        ],
        rule="each rank sends only the chunk of its rail to other nodes",
    )


@clause(
    "topology.hierarchical",
    "C4",
    worlds=(6, 4),
    runs=[on_ranks(over_nodes, of_one_size=True)],
)
def few_bytes_intra_node(runs: Runs) -> str | None:
    """A reduce-scatter and an all-gather, where the nodes have one size."""
    run = runs.finished(over_nodes, of_one_size=True)
    for number, (nodes, count) in enumerate(settings(runs.world_size, True)):
        k = len(nodes[0])
        most = 2 * (k - 1) * ceil(count / k) * ITEM
        sent = [value[number]["intra_node"] for value in run.values]
        if max(sent) > most:
            rank = sent.index(max(sent))
            raise NotYetError(
                f"{on_nodes(nodes)}, rank {rank} sent {max(sent)} bytes within its "
                f"node, expected at most {most}",
                slug="whole-tensor-intra-node",
                evidence=[
                    (
                        rank,
                        "much" if amount > most else "right",
                        f"{amount} bytes of a tensor of {count * ITEM}",
                    )
                    for rank, amount in enumerate(sent)
                ],
                rule="before the last stage, a rank needs the sum of one chunk only",
            )
    return None
