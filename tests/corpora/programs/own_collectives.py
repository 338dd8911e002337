"""The corpus, collectives built from messages: rings, trees, doublings, exchanges."""

from __future__ import annotations

import torch
from torch import Tensor

from distlab.runner import RankContext
from tests.corpora.programs.case import flawed, hangs, raises, right


def ones(rank: int, size: int = 12) -> Tensor:
    return torch.full((size,), float(rank + 1))


def total(rank: int, n: int) -> list[float]:
    return [n * (n + 1) / 2.0] * 12


def everyones(rank: int, n: int) -> list[list[float]]:
    return [[src + 1.0] * 12 for src in range(n)]


# ── right ───────────────────────────────────────────────────────────────────────────


@right(2, 3, 4, gives=total)
def ring_all_reduce(ctx: RankContext) -> Tensor:
    """Reduce-scatter, then all-gather, n - 1 steps each."""
    rank, n, tensor = ctx.rank, ctx.world_size, ones(ctx.rank)
    chunks = list(tensor.chunk(n))
    for step in range(2 * (n - 1)):
        out, into = (rank - step) % n, (rank - step - 1) % n
        got = torch.empty_like(chunks[into])
        ctx.comm.sendrecv(chunks[out], (rank + 1) % n, got, (rank - 1) % n)
        if step < n - 1:
            chunks[into] += got
        else:
            chunks[into].copy_(got)
    return tensor


@right(3, 5, gives=total)
def ring_of_blocking_calls(ctx: RankContext) -> Tensor:
    """Partial sums go around once and the result once more; only rank 0 begins."""
    rank, n, tensor = ctx.rank, ctx.world_size, ones(ctx.rank)
    for is_result in (False, True):
        got = torch.empty_like(tensor)
        if rank == 0:
            ctx.comm.send(tensor, 1)
            ctx.comm.recv(tensor, n - 1)
            continue
        ctx.comm.recv(got, rank - 1)
        tensor = got if is_result else tensor + got
        ctx.comm.send(tensor, (rank + 1) % n)
    return tensor


@right(2, 4, gives=total)
def recursive_doubling(ctx: RankContext) -> Tensor:
    """Partners twice as far apart in every step."""
    tensor, distance = ones(ctx.rank), 1
    while distance < ctx.world_size:
        partner, got = ctx.rank ^ distance, torch.empty_like(tensor)
        ctx.comm.sendrecv(tensor, partner, got, partner)
        tensor += got
        distance *= 2
    return tensor


@right(2, 3, 5, gives=lambda rank, n: [3.0 if n > 2 else 2.0] * 12)
def tree_from_any_root(ctx: RankContext) -> Tensor:
    """A broadcast down a binomial tree, counted from the root, which is not rank 0."""
    n, tensor, root = ctx.world_size, ones(ctx.rank), min(2, ctx.world_size - 1)
    me, reach = (ctx.rank - root) % n, 1
    while reach < n:
        if me < reach and me + reach < n:
            ctx.comm.send(tensor, (me + reach + root) % n)
        elif reach <= me < 2 * reach:
            ctx.comm.recv(tensor, (me - reach + root) % n)
        reach *= 2
    return tensor


@right(3, 4, gives=lambda rank, n: everyones(rank, n) if rank == n - 1 else [])
def gather_to_the_last(ctx: RankContext) -> list[Tensor]:
    """The last rank takes from all others in turn, and its own without a message."""
    n, root = ctx.world_size, ctx.world_size - 1
    if ctx.rank != root:
        ctx.comm.send(ones(ctx.rank), root)
        return []
    parts = [ones(root) for _ in range(n)]
    for src in range(n - 1):
        ctx.comm.recv(parts[src], src)
    return parts


@right(2, 4, gives=lambda rank, n: [rank * 3.0 + i for i in range(3)])
def scatter_rows(ctx: RankContext) -> Tensor:
    """Rank 0 keeps a row of a table and sends one to each of the others."""
    table, row = torch.arange(3.0 * ctx.world_size).view(-1, 3), torch.zeros(3)
    if ctx.rank:
        ctx.comm.recv(row, 0)
        return row
    works = [ctx.comm.isend(table[dst], dst) for dst in range(1, ctx.world_size)]
    for work in works:
        work.wait()
    return table[0]


@right(3, 4, gives=everyones)
def ring_all_gather(ctx: RankContext) -> list[Tensor]:
    """What came from the left is passed on to the right."""
    rank, n = ctx.rank, ctx.world_size
    parts = [ones(rank) for _ in range(n)]
    for step in range(n - 1):
        out, into = (rank - step) % n, (rank - step - 1) % n
        ctx.comm.sendrecv(parts[out], (rank + 1) % n, parts[into], (rank - 1) % n)
    return parts


@right(3, 4, gives=lambda rank, n: [[10.0 * src + rank] for src in range(n)])
def all_to_all_lower_first(ctx: RankContext) -> list[Tensor]:
    """Pair by pair with blocking calls: of two ranks the lower one sends first."""
    parts = [torch.tensor([10.0 * ctx.rank + ctx.rank])] * ctx.world_size
    for peer in range(ctx.world_size):
        mine, got = torch.tensor([10.0 * ctx.rank + peer]), torch.zeros(1)
        if ctx.rank < peer:
            ctx.comm.send(mine, peer)
            ctx.comm.recv(got, peer)
        elif ctx.rank > peer:
            ctx.comm.recv(got, peer)
            ctx.comm.send(mine, peer)
        if peer != ctx.rank:
            parts[peer] = got
    return parts


@right(2, 3, 5, gives=lambda rank, n: [float(n)])
def barrier_by_dissemination(ctx: RankContext) -> Tensor:
    """Tell the rank 1, 2, 4, … further on; in the end all have heard of all."""
    rank, n, distance = ctx.rank, ctx.world_size, 1
    heard = torch.zeros(n)
    heard[rank] = 1
    while distance < n:
        got = torch.zeros(n)
        ctx.comm.sendrecv(heard, (rank + distance) % n, got, (rank - distance) % n)
        heard = heard.maximum(got)
        distance *= 2
    return heard.sum().view(1)


@right(2, 5, gives=lambda rank, n: [(rank + 1) * (rank + 2) / 2.0] * 12)
def prefix_sum(ctx: RankContext) -> Tensor:
    """Each adds its own to what came from below: a chain, so blocking calls do."""
    tensor, got = ones(ctx.rank), ones(0)
    if ctx.rank:
        ctx.comm.recv(got, ctx.rank - 1)
        tensor += got
    if ctx.rank < ctx.world_size - 1:
        ctx.comm.send(tensor, ctx.rank + 1)
    return tensor


# ── buggy ───────────────────────────────────────────────────────────────────────────


@hangs(2, 3, 4)
def ring_with_uneven_steps(ctx: RankContext) -> None:
    """Rank 0 counts its steps from 0 to n, the others from 0 to n - 1."""
    rank, n, got = ctx.rank, ctx.world_size, ones(0)
    for _ in range(n if rank == 0 else n - 1):
        ctx.comm.sendrecv(ones(rank), (rank + 1) % n, got, (rank - 1) % n)  # guilty


@flawed("mismatched-buffers", 3)
def ring_with_uneven_chunks(ctx: RankContext) -> None:
    """Seven numbers for three ranks: the box has the size of the first chunk."""
    rank, n = ctx.rank, ctx.world_size
    chunks = torch.arange(7.0).tensor_split(n)
    for step in range(n - 1):
        got = torch.zeros(3)
        out = (rank - step) % n
        ctx.comm.sendrecv(chunks[out], (rank + 1) % n, got, (rank - 1) % n)  # guilty


@raises("CommRefusedError", 3, 5)
def doubling_beyond_the_end(ctx: RankContext) -> None:
    """Recursive doubling where the number of ranks is no power of two."""
    distance = 1
    while distance < ctx.world_size:
        partner = ctx.rank ^ distance
        ctx.comm.sendrecv(ones(0), partner, ones(0), partner)  # guilty
        distance *= 2


@right(2, gives=lambda rank, n: None)
@hangs(3, 4)
def doubling_without_partners(ctx: RankContext) -> None:
    """Adds the distance instead of flipping a bit: nobody has whom it has."""
    distance = 1
    while distance < ctx.world_size:
        partner = (ctx.rank + distance) % ctx.world_size
        ctx.comm.sendrecv(ones(0), partner, ones(0), partner)  # guilty
        distance *= 2


@hangs(4)
def halving_with_early_leavers(ctx: RankContext) -> None:
    """Who has handed its sum on is done, it thinks, and misses the result."""
    distance = 1
    while distance < ctx.world_size:
        partner = ctx.rank ^ distance
        if ctx.rank & distance:
            ctx.comm.send(ones(0), partner)
            return
        ctx.comm.recv(ones(0), partner)
        distance *= 2
    for dst in range(1, ctx.world_size):
        ctx.comm.send(ones(0), dst)  # guilty


@hangs(4)
def tree_that_forgets_its_root(ctx: RankContext) -> None:
    """The root is rank 1, but parents are counted from rank 0."""
    n, tensor, root = ctx.world_size, ones(ctx.rank), 1
    me, reach = (ctx.rank - root) % n, 1
    while reach < n:
        if me < reach and me + reach < n:
            ctx.comm.send(tensor, (me + reach + root) % n)
        elif reach <= me < 2 * reach:
            ctx.comm.recv(tensor, me - reach)  # guilty
        reach *= 2


@raises("CommRefusedError", 2, 3)
def gather_from_everyone(ctx: RankContext) -> None:
    """The root receives from all ranks, and it is one of them."""
    if ctx.rank == 0:
        for src in range(ctx.world_size):
            ctx.comm.recv(ones(0), src)  # guilty
    else:
        ctx.comm.send(ones(0), 0)


@hangs(3, 4)
def gather_to_two_roots(ctx: RankContext) -> None:
    """The last rank still has the root of before."""
    if ctx.rank == 0:
        for src in range(1, ctx.world_size):
            ctx.comm.recv(ones(0), src)
    else:
        root = int(ctx.rank == ctx.world_size - 1)
        ctx.comm.send(ones(0), root)  # guilty


@hangs(2, 3)
def all_to_all_sends_first(ctx: RankContext) -> None:
    """Everybody sends to all others, and only then would receive."""
    peers = [peer for peer in range(ctx.world_size) if peer != ctx.rank]
    for peer in peers:
        ctx.comm.send(ones(0), peer)  # guilty
    for peer in peers:
        ctx.comm.recv(ones(0), peer)


@hangs(3, 4)
def chain_that_closes(ctx: RankContext) -> None:
    """A broadcast along a chain, whose last rank passes it on to the first."""
    if ctx.rank:
        ctx.comm.recv(ones(0), ctx.rank - 1)
    ctx.comm.send(ones(0), (ctx.rank + 1) % ctx.world_size)  # guilty


@hangs(3, 5)
def barrier_with_one_sign_wrong(ctx: RankContext) -> None:
    """Tells the rank further on, and listens to the same one."""
    rank, n, distance = ctx.rank, ctx.world_size, 1
    while distance < n:
        peer = (rank + distance) % n
        ctx.comm.sendrecv(ones(0), peer, ones(0), peer)  # guilty
        distance *= 2


@hangs(3)
def gather_in_the_wrong_order(ctx: RankContext) -> None:
    """Rank 2 waits for the root's word, which the root gives after having heard it."""
    if ctx.rank == 0:
        for src in (2, 1):
            ctx.comm.recv(ones(0), src)
            ctx.comm.send(ones(0), src)
    elif ctx.rank == 1:
        ctx.comm.send(ones(0), 0)
        ctx.comm.recv(ones(0), 0)
    else:
        ctx.comm.recv(ones(0), 0)  # guilty
        ctx.comm.send(ones(0), 0)
