"""The corpus, groups: parts of the world that talk among themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from distlab.runner import RankContext
from tests.corpora.programs.case import hangs, raises, right


def ones(rank: int) -> Tensor:
    return torch.full((4,), float(rank + 1))


# ── right ───────────────────────────────────────────────────────────────────────────


@right(4, gives=lambda rank, n: [[3.0, 7.0][rank // 2], [4.0, 6.0][rank % 2]])
def rows_and_columns(ctx: RankContext) -> list[float]:
    """Four ranks as a square: a sum along its rows, another one along its columns."""
    sums = []
    for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        tensor = ones(ctx.rank)
        for ranks in groups:
            group = ctx.comm.new_group(ranks)
            if group is not None:
                group.all_reduce(tensor)
        sums.append(float(tensor[0]))
    return sums


@right(3, gives=lambda rank, n: [[4.0, 3.0, 4.0][rank]])
def pairs_in_one_order(ctx: RankContext) -> list[float]:
    """Three groups that overlap in a circle; all ranks go through them alike."""
    groups = [ctx.comm.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
    tensors = []
    for group in groups:
        if group is not None:
            tensors.append(ones(ctx.rank))
            group.all_reduce(tensors[-1])
    return [float(tensors[-1][0] if ctx.rank != 1 else tensors[0][0])]


@right(4, gives=lambda rank, n: [[3.0, 4.0, 1.0, 2.0][rank]] * 4)
def ring_inside_a_group(ctx: RankContext) -> Tensor:
    """Even ranks and odd ranks swap among themselves, by the numbers of their group."""
    groups = [ctx.comm.new_group([start, start + 2]) for start in (0, 1)]
    group, got = groups[ctx.rank % 2], ones(0)
    assert group is not None
    peer = 1 - group.rank
    group.sendrecv(ones(ctx.rank), peer, got, peer)
    return got


@right(3, 4, gives=lambda rank, n: [[n * (n - 1) / 2.0 - 1], [0.0]][rank == 0])
def workers_without_their_server(ctx: RankContext) -> list[float]:
    """All ranks make the group, and only its members use it."""
    workers = ctx.comm.new_group(list(range(1, ctx.world_size)))
    if workers is None:
        return [0.0]
    tensor = torch.tensor([ctx.rank - 1.0 / workers.world_size])
    workers.all_reduce(tensor)
    return [round(float(tensor), 4)]


@right(4, gives=lambda rank, n: [[3.0, 7.0][rank // 2]] * 4)
def groups_made_in_two_orders(ctx: RankContext) -> Tensor:
    """The upper half makes its own group first: a group is its members."""
    halves, tensor = [[0, 1], [2, 3]], ones(ctx.rank)
    if ctx.rank >= 2:
        halves.reverse()
    groups = [ctx.comm.new_group(ranks) for ranks in halves]
    mine = next(group for group in groups if group is not None)
    mine.all_reduce(tensor)
    return tensor


# ── buggy ───────────────────────────────────────────────────────────────────────────


@hangs(3, 4)
def only_members_make_the_group(ctx: RankContext) -> None:
    """new_group is a call of the whole world, also of those outside the group."""
    if ctx.rank < 2:
        ctx.comm.new_group([0, 1])  # guilty


@hangs(3)
def pairs_in_a_circle(ctx: RankContext) -> None:
    """Each rank begins with the group to its right: a circle of three groups."""
    groups = [ctx.comm.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
    for index in (ctx.rank, (ctx.rank + 2) % 3):
        group = groups[index]
        assert group is not None
        group.all_reduce(ones(ctx.rank))  # guilty


@hangs(3, 4)
def world_instead_of_group(ctx: RankContext) -> None:
    """Rank 1 averages over the world, its partner over the group of both."""
    pair = ctx.comm.new_group([0, 1])
    if pair is not None and ctx.rank == 0:
        pair.all_reduce(ones(0))
    elif ctx.rank == 1:
        ctx.comm.all_reduce(ones(1))  # guilty


@hangs(4)
def other_group_than_its_partner(ctx: RankContext) -> None:
    """Rank 3 sums along its row while the others sum along their columns."""
    rows = [ctx.comm.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [ctx.comm.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    group = rows[1] if ctx.rank == 3 else columns[ctx.rank % 2]
    assert group is not None
    group.all_reduce(ones(ctx.rank))  # guilty


@hangs(3)
def message_in_another_group(ctx: RankContext) -> None:
    """Sent in the world, awaited in the group: the channels are apart."""
    pair = ctx.comm.new_group([0, 1])
    if ctx.rank == 0:
        ctx.comm.send(ones(0), 1)
    elif pair is not None:
        pair.recv(ones(0), 0)  # guilty


@hangs(3)
def one_member_stays_away(ctx: RankContext) -> None:
    """Of the group's two ranks, the second one has nothing to add."""
    group = ctx.comm.new_group([1, 2])
    if group is not None and group.rank == 0:
        group.all_reduce(ones(1))  # guilty


@raises("CommRefusedError", 3, 4)
def rank_of_the_world_in_the_group(ctx: RankContext) -> None:
    """In a group of two there is no rank 2: its members are counted anew."""
    group = ctx.comm.new_group([1, 2])
    if group is not None:
        group.broadcast(ones(ctx.rank), 2)  # guilty


@raises("AttributeError", 3)
def not_a_member(ctx: RankContext) -> None:
    """Outside the group new_group returns None."""
    group = ctx.comm.new_group([0, 1])
    group.all_reduce(ones(ctx.rank))  # type: ignore[union-attr]  # guilty
