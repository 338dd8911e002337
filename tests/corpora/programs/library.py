"""The corpus, library collectives: all the ranks of the world in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from distlab.comm import ReduceOp
from distlab.runner import RankContext
from tests.corpora.programs.case import flawed, hangs, raises, right


def ones(rank: int, size: int = 4) -> Tensor:
    return torch.full((size,), float(rank + 1))


# ── right ───────────────────────────────────────────────────────────────────────────


@right(2, 3, gives=lambda rank, n: [[3.0] * 4, [(n + 1) / 2.0] * 4, [float(n)] * 4])
def one_after_the_other(ctx: RankContext) -> list[Tensor]:
    """Broadcast, average and maximum, in the same order on all ranks."""
    sent, mean, most = ones(2 if ctx.rank == 0 else 9), ones(ctx.rank), ones(ctx.rank)
    ctx.comm.broadcast(sent, 0)
    ctx.comm.all_reduce(mean, ReduceOp.AVG)
    ctx.comm.all_reduce(most, ReduceOp.MAX)
    return [sent, mean, most]


@right(2, 4, gives=lambda rank, n: [5.0] * 4)
def same_collective_on_two_lines(ctx: RankContext) -> Tensor:
    """The root's broadcast stands on another line than that of the others."""
    if ctx.rank == 0:
        tensor = ones(4)
        ctx.comm.broadcast(tensor, 0)
    else:
        tensor = ones(0)
        ctx.comm.broadcast(tensor, 0)
    return tensor


@right(2, 4, gives=lambda rank, n: [n * (n + 1) / 2.0] * 8)
def all_reduce_in_two_halves(ctx: RankContext) -> Tensor:
    """A reduce-scatter and an all-gather make an all-reduce."""
    whole, n = ones(ctx.rank, 8), ctx.world_size
    mine = torch.zeros(8 // n)
    ctx.comm.reduce_scatter(mine, whole)
    ctx.comm.all_gather(whole, mine)
    return whole


@right(3, 4, gives=lambda rank, n: [float(n * i + rank) for i in range(n)])
def transpose(ctx: RankContext) -> Tensor:
    """All-to-all: each rank has a row of a table, and then a column."""
    n = ctx.world_size
    row, column = torch.arange(1.0 * n) + n * ctx.rank, torch.zeros(n)
    ctx.comm.all_to_all(column, row)
    return column


@right(2, 3, gives=lambda rank, n: [n * (n + 1) / 2.0 if rank == n - 1 else 0.0])
def reduce_to_the_last(ctx: RankContext) -> list[float]:
    """Only the last rank looks at the result."""
    tensor, root = ones(ctx.rank), ctx.world_size - 1
    ctx.comm.reduce(tensor, root)
    return [float(tensor[0]) if ctx.rank == root else 0.0]


@right(2, 3, 4, gives=lambda rank, n: [n * (n + 1) / 2.0] * 9000)
def long_reduce_to_each(ctx: RankContext) -> Tensor:
    """So many elements that a transport may go another way, to one root after another.

    What the others then have in their tensors is not for use.
    """
    tensors = [ones(ctx.rank, 9000) for _ in range(ctx.world_size)]
    for root, tensor in enumerate(tensors):
        ctx.comm.reduce(tensor, root)
    return tensors[ctx.rank]


@right(2, 3, gives=lambda rank, n: [n * 1.0, n * 2.0, n * 3.0])
def overlapping_all_reduces(ctx: RankContext) -> list[float]:
    """Three under way at once; a barrier between, and waited for backwards."""
    tensors = [torch.full((4,), step + 1.0) for step in range(3)]
    works = [ctx.comm.all_reduce(tensor, async_op=True) for tensor in tensors]
    ctx.comm.barrier()
    for work in reversed(works):
        assert work is not None
        work.wait()
    return [float(tensor[0]) for tensor in tensors]


@right(3, gives=lambda rank, n: [float(rank == 1)] * 4)
def messages_between_barriers(ctx: RankContext) -> Tensor:
    """Two ranks talk while the third waits at the barrier: it can wait."""
    got = ones(-1)
    ctx.comm.barrier()
    if ctx.rank == 0:
        ctx.comm.send(ones(0), 1)
    elif ctx.rank == 1:
        ctx.comm.recv(got, 0)
    ctx.comm.barrier()
    return got


@right(2, 3, gives=lambda rank, n: [float(n - rank)])
def leaves_when_all_know(ctx: RankContext) -> Tensor:
    """Ranks end at different times, but after the last call that all make."""
    left = torch.tensor([1.0])
    ctx.comm.all_reduce(left)
    if ctx.rank == 0:
        return left
    for _ in range(ctx.rank):
        left -= 1
    return left


# ── buggy ───────────────────────────────────────────────────────────────────────────


@hangs(2, 3)
def other_order(ctx: RankContext) -> None:
    """Rank 0 averages and then broadcasts, the others the other way round."""
    tensor = ones(ctx.rank)
    if ctx.rank == 0:
        ctx.comm.all_reduce(tensor)  # guilty
        ctx.comm.broadcast(tensor, 0)
    else:
        ctx.comm.broadcast(tensor, 0)
        ctx.comm.all_reduce(tensor)


@hangs(2, 3)
def average_for_the_log(ctx: RankContext) -> None:
    """Only rank 0 prints the mean loss, so only rank 0 asks for it."""
    loss = ones(ctx.rank, 1)
    if ctx.rank == 0:
        ctx.comm.all_reduce(loss, ReduceOp.AVG)  # guilty
        print(f"loss {float(loss):.2f}")


@hangs(3, 4)
def barrier_in_a_branch(ctx: RankContext) -> None:
    """The one that writes the checkpoint does not come to the barrier after it."""
    if ctx.rank == 0:
        return
    ctx.comm.barrier()  # guilty


@hangs(2, 3)
def reduce_instead_of_all_reduce(ctx: RankContext) -> None:
    """One rank calls the one, the others the other."""
    tensor = ones(ctx.rank)
    if ctx.rank == 1:
        ctx.comm.reduce(tensor, 0)  # guilty
    else:
        ctx.comm.all_reduce(tensor)


@hangs(3)
def everybody_is_the_root(ctx: RankContext) -> None:
    """Each rank broadcasts from itself."""
    ctx.comm.broadcast(ones(ctx.rank), ctx.rank)  # guilty


@hangs(2, 4)
def gather_only_at_the_root(ctx: RankContext) -> None:
    """The root thinks that gathering is its own affair, the others go on."""
    if ctx.rank == 0:
        ctx.comm.all_gather(torch.zeros(4 * ctx.world_size), ones(0))  # guilty
    ctx.comm.barrier()


@hangs(2, 3)
def one_more_for_luck(ctx: RankContext) -> None:
    """The last rank synchronises once more than the others."""
    for _ in range(2 + (ctx.rank == ctx.world_size - 1)):
        ctx.comm.barrier()  # guilty


@hangs(2)
def collective_against_a_message(ctx: RankContext) -> None:
    """Rank 0 waits in a barrier for rank 1, which waits for its message."""
    if ctx.rank == 0:
        ctx.comm.barrier()  # guilty
        ctx.comm.send(ones(0), 1)
    else:
        ctx.comm.recv(ones(0), 0)
        ctx.comm.barrier()


@hangs(2, 3)
def async_in_another_order(ctx: RankContext) -> None:
    """Two reductions of different size are started in another order on rank 0."""
    small, large = ones(ctx.rank, 2), ones(ctx.rank, 6)
    if ctx.rank == 0:
        works = [ctx.comm.all_reduce(large, async_op=True)]  # guilty
        ctx.comm.barrier()
    else:
        works = []
        ctx.comm.barrier()
        works = [ctx.comm.all_reduce(small, async_op=True)]
    for work in works:
        assert work is not None
        work.wait()


@raises("CommRefusedError", 2, 3)
def no_such_root(ctx: RankContext) -> None:
    """Ranks counted from 1."""
    ctx.comm.broadcast(ones(ctx.rank), ctx.world_size)  # guilty


@raises("CommRefusedError", 2, 3)
def output_too_small(ctx: RankContext) -> None:
    """The gathered tensor has room for one part only."""
    ctx.comm.all_gather(torch.zeros(4), ones(ctx.rank))  # guilty


@flawed("never-waited", 2, 3)
def started_and_forgotten(ctx: RankContext) -> None:
    """Goes on computing with a sum that may not be there yet."""
    ctx.comm.all_reduce(ones(ctx.rank), async_op=True)  # guilty
    ctx.comm.barrier()
