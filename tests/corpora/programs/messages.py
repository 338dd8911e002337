"""The corpus, point to point: what two ranks or three say to each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distlab.comm import ANY
from distlab.runner import RankContext
from tests.corpora.programs.case import flawed, hangs, misfit, raises, right


def filled(value: float, size: int = 4) -> Tensor:
    return torch.full((size,), float(value))


def box(size: int = 4) -> Tensor:
    return torch.zeros(size)


def neighbors(ctx: RankContext) -> tuple[int, int]:
    return (ctx.rank - 1) % ctx.world_size, (ctx.rank + 1) % ctx.world_size


# ── right ───────────────────────────────────────────────────────────────────────────


@right(2, gives=lambda rank, n: [8.0] * 4)
def ping_pong(ctx: RankContext) -> Tensor:
    """Back and forth four times; each adds one."""
    ball, peer = box(), 1 - ctx.rank
    for turn in range(8):
        if turn % 2 == ctx.rank:
            ball += 1
            ctx.comm.send(ball, peer)
        else:
            ctx.comm.recv(ball, peer)
    return ball


@right(2, 3, 5, gives=lambda rank, n: [float(max(rank, 1))] * 4)
def domino(ctx: RankContext) -> Tensor:
    """All but the last send first: no circle, so they free each other one by one."""
    got = filled(1)
    if ctx.rank < ctx.world_size - 1:
        ctx.comm.send(filled(ctx.rank + 1), ctx.rank + 1)
    if ctx.rank > 0:
        ctx.comm.recv(got, ctx.rank - 1)
    return got


@right(2, 3, 4, gives=lambda rank, n: [float((rank - 1) % n)] * 4)
def irecv_before_send(ctx: RankContext) -> Tensor:
    """A ring of blocking sends that is none: all have posted their receive before."""
    left, right_ = neighbors(ctx)
    got = box()
    work = ctx.comm.irecv(got, left)
    ctx.comm.send(filled(ctx.rank), right_)
    work.wait()
    return got


@right(5, gives=lambda rank, n: [float((rank - 2) % 5)] * 4)
def shift_by_two(ctx: RankContext) -> Tensor:
    """A ring that skips every other rank and still reaches all."""
    got = box()
    ctx.comm.sendrecv(filled(ctx.rank), (ctx.rank + 2) % 5, got, (ctx.rank - 2) % 5)
    return got


@right(2, 4, gives=lambda rank, n: [float(rank ^ 1)] * 4)
def partners_swap(ctx: RankContext) -> Tensor:
    """0 with 1, 2 with 3: to and from the same rank at once."""
    got, partner = box(), ctx.rank ^ 1
    ctx.comm.sendrecv(filled(ctx.rank), partner, got, partner)
    return got


@right(3, 4, gives=lambda rank, n: [n * (n - 1) / 2.0 if rank == 0 else 0.0] * 4)
def whoever_comes_first(ctx: RankContext) -> Tensor:
    """Rank 0 adds up what arrives; the order does not matter."""
    total = box()
    if ctx.rank:
        ctx.comm.send(filled(ctx.rank), 0)
        return total
    for _ in range(ctx.world_size - 1):
        got = box()
        ctx.comm.recv(got, ANY)
        total += got
    return total


@right(3, 5, gives=lambda rank, n: [10.0 * rank] * 4)
def reply_to_who_asked(ctx: RankContext) -> Tensor:
    """A server that answers each question to the one who asked it."""
    got = box()
    if ctx.rank:
        ctx.comm.send(filled(ctx.rank), 0, tag=1)
        ctx.comm.recv(got, 0, tag=2)
        return got
    for _ in range(ctx.world_size - 1):
        question = box()
        src = ctx.comm.recv(question, ANY, tag=1)
        ctx.comm.send(10 * question, src, tag=2)
    return got


@right(2, 4, gives=lambda rank, n: [[0.0, n - 1.0], [6.0, 6.0]][rank > 0])
def header_then_body(ctx: RankContext) -> list[float]:
    """The size comes first, from anyone; then, from that one, so many numbers."""
    if ctx.rank:
        ctx.comm.send(torch.tensor([2 + ctx.rank]), 0, tag=1)
        ctx.comm.send(filled(1, 2 + ctx.rank), 0, tag=2)
        return [6.0, 6.0]
    wrong = 0.0
    for _ in range(ctx.world_size - 1):
        header = torch.zeros(1, dtype=torch.int64)
        src = ctx.comm.recv(header, ANY, tag=1)
        body = box(int(header))
        ctx.comm.recv(body, src, tag=2)
        wrong += float(body.sum()) != 2 + src
    return [wrong, ctx.world_size - 1.0]


@right(2, 3, gives=lambda rank, n: [float(rank == 1)] * 4)
def barrier_while_under_way(ctx: RankContext) -> Tensor:
    """The receiver asks only after the barrier: an isend does not wait for it."""
    got, work = box(), None
    if ctx.rank == 0:
        work = ctx.comm.isend(filled(1), 1)
    ctx.comm.barrier()
    if ctx.rank == 1:
        ctx.comm.recv(got, 0)
    if work is not None:
        work.wait()
    return got


@right(2, gives=lambda rank, n: [[0.0, 0.0], [1.0, 2.0]][rank])
def posted_tag_overtakes(ctx: RankContext) -> list[float]:
    """Tag 2 is taken while tag 1 is still posted; blocking sends in the other order."""
    first, second = box(), box()
    if ctx.rank == 0:
        ctx.comm.send(filled(1), 1, tag=1)
        ctx.comm.send(filled(2), 1, tag=2)
    else:
        work = ctx.comm.irecv(first, 0, tag=1)
        ctx.comm.recv(second, 0, tag=2)
        work.wait()
    return [float(first[0]), float(second[0])]


@right(3, gives=lambda rank, n: [[0.0], [12.0], [0.0]][rank])
def two_senders_one_tag(ctx: RankContext) -> list[float]:
    """Rank 1 takes the later message first: the channels are apart."""
    if ctx.rank != 1:
        ctx.comm.send(filled(10 if ctx.rank else 1), 1)
        return [0.0]
    early, late = box(), box()
    ctx.comm.recv(late, 2)
    ctx.comm.recv(early, 0)
    return [float(late[0]) + 2 * float(early[0])]


@right(2, gives=lambda rank, n: [[3.0, 3.0], [4.0, 4.0]][rank])
def waits_twice(ctx: RankContext) -> list[float]:
    """A second wait for the same transfer returns at once."""
    peer, got = 1 - ctx.rank, box()
    works = [ctx.comm.irecv(got, peer), ctx.comm.isend(filled(4 - ctx.rank), peer)]
    for work in (*works, *works):
        work.wait()
    return got.tolist()[:2]


# ── buggy ───────────────────────────────────────────────────────────────────────────


@hangs(2, 3)
def tags_crossed(ctx: RankContext) -> None:
    """Sent as 1, 2 and received as 2, 1, both blocking."""
    if ctx.rank == 0:
        ctx.comm.send(box(), 1, tag=1)
        ctx.comm.send(box(), 1, tag=2)
    elif ctx.rank == 1:
        ctx.comm.recv(box(), 0, tag=2)  # guilty
        ctx.comm.recv(box(), 0, tag=1)


@hangs(2)
def tag_is_the_step(ctx: RankContext) -> None:
    """One counts the steps from 0 and the other from 1."""
    for step in range(3):
        if ctx.rank == 0:
            ctx.comm.send(box(), 1, tag=step)
        else:
            ctx.comm.recv(box(), 0, tag=step + 1)  # guilty


@hangs(4, 5)
def listens_to_the_wrong_side(ctx: RankContext) -> None:
    """Odd ranks receive from the right, where even ranks send to the right."""
    left, right_ = neighbors(ctx)
    if ctx.rank % 2:
        ctx.comm.recv(box(), right_)  # guilty
        ctx.comm.send(box(), right_)
    else:
        ctx.comm.send(box(), right_)
        ctx.comm.recv(box(), left)


@right(2, gives=lambda rank, n: None)
@hangs(3, 4)
def one_turns_the_other_way(ctx: RankContext) -> None:
    """Rank 0 mixes up its neighbors."""
    left, right_ = neighbors(ctx)
    if ctx.rank == 0:
        ctx.comm.sendrecv(box(), left, box(), right_)  # guilty
    else:
        ctx.comm.sendrecv(box(), right_, box(), left)


@hangs(5)
def three_of_five_in_a_circle(ctx: RankContext) -> None:
    """Ranks 3 and 4 get on with each other; the others all send."""
    if ctx.rank < 3:
        ctx.comm.send(box(), (ctx.rank + 1) % 3)  # guilty
        ctx.comm.recv(box(), (ctx.rank - 1) % 3)
    else:
        ctx.comm.sendrecv(box(), 7 - ctx.rank, box(), 7 - ctx.rank)


@hangs(3)
def triangle(ctx: RankContext) -> None:
    """0 sends to 2, which waits for 1, which waits for 0."""
    if ctx.rank == 0:
        ctx.comm.send(box(), 2)  # guilty
        ctx.comm.send(box(), 1)
    else:
        ctx.comm.recv(box(), ctx.rank - 1)
        if ctx.rank == 1:
            ctx.comm.send(box(), 2)
        else:
            ctx.comm.recv(box(), 0)


@hangs(3, 4)
def knot_around_anyone(ctx: RankContext) -> None:
    """Rank 0 takes from anyone, and everyone waits for its word to begin."""
    if ctx.rank == 0:
        ctx.comm.recv(box(), ANY)  # guilty
        for dst in range(1, ctx.world_size):
            ctx.comm.send(box(), dst)
    else:
        ctx.comm.recv(box(), 0)
        ctx.comm.send(box(), 0)


@hangs(3)
def anyone_takes_what_was_meant_for_later(ctx: RankContext) -> None:
    """The first receive takes rank 1's only message, the second asks for it."""
    if ctx.rank == 0:
        ctx.comm.recv(box(), ANY)  # guilty
        ctx.comm.recv(box(), 1)
    elif ctx.rank == 1:
        ctx.comm.send(box(), 0)
        ctx.comm.send(box(), 2)
    else:
        ctx.comm.recv(box(), 1)
        ctx.comm.send(box(), 0)


@hangs(3, 4)
def reply_to_the_next(ctx: RankContext) -> None:
    """A server that answers the one after the one who asked."""
    if ctx.rank:
        ctx.comm.send(box(), 0)
        ctx.comm.recv(box(), 0)
        return
    for src in range(1, ctx.world_size):
        ctx.comm.recv(box(), src)
        ctx.comm.send(box(), src % (ctx.world_size - 1) + 1)  # guilty


@hangs(2)
def rounds_down_on_one_side(ctx: RankContext) -> None:
    """Seven numbers in pairs: four messages are sent and three are taken."""
    if ctx.rank == 0:
        for part in torch.arange(7.0).split(2):
            ctx.comm.send(part, 1)  # guilty
    else:
        for _ in range(7 // 2):
            ctx.comm.recv(box(2), 0)


@hangs(3)
def irecv_of_nobody(ctx: RankContext) -> list[Any]:
    """Posts a receive from both sides, at the end of a line that has only one."""
    rank, n, got = ctx.rank, ctx.world_size, [box(), box()]
    works = [ctx.comm.isend(box(), p) for p in (rank - 1, rank + 1) if 0 <= p < n]
    works.append(ctx.comm.irecv(got[0], (rank - 1) % n))  # guilty
    works.append(ctx.comm.irecv(got[1], (rank + 1) % n))  # guilty
    for work in works:
        work.wait()
    return got


@flawed("never-waited", 2)
def irecv_never_waited(ctx: RankContext) -> None:
    """Goes on with whatever is in the tensor by then."""
    if ctx.rank == 1:
        ctx.comm.irecv(box(), 0)  # guilty
    else:
        ctx.comm.send(box(), 1)
    ctx.comm.barrier()


@flawed("mismatched-buffers", 2)
def same_bytes_other_dtype(ctx: RankContext) -> None:
    """Four whole numbers read as four fractions."""
    if ctx.rank == 0:
        ctx.comm.send(torch.arange(4, dtype=torch.int32), 1)
    else:
        ctx.comm.recv(box(), 0)  # guilty


@misfit("mismatched-buffers", 2)
def more_than_there_is_room_for(ctx: RankContext) -> None:
    """Six numbers arrive where there is room for four."""
    if ctx.rank == 0:
        ctx.comm.send(box(6), 1)
    else:
        ctx.comm.recv(box(4), 0)  # guilty


@right(2, gives=lambda rank, n: [float(1 - rank)] * 4)
@raises("CommRefusedError", 3)
def mirrored(ctx: RankContext) -> Tensor:
    """First with last, second with last but one: the middle one is alone."""
    partner, got = ctx.world_size - 1 - ctx.rank, box()
    if ctx.rank < partner:
        ctx.comm.send(filled(ctx.rank), partner)
        ctx.comm.recv(got, partner)
    else:
        ctx.comm.recv(got, partner)  # guilty
        ctx.comm.send(filled(ctx.rank), partner)
    return got


@raises("CommRefusedError", 2, 3)
def a_column_is_not_contiguous(ctx: RankContext) -> None:
    """Sends a column of a matrix, whose elements do not lie side by side."""
    if ctx.rank == 0:
        ctx.comm.send(torch.zeros(3, 3)[:, 1], 1)  # guilty
    elif ctx.rank == 1:
        ctx.comm.recv(box(3), 0)
