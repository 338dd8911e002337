"""The corpus, absentees: each collective of the library, called by all ranks but one.

Which of the others are through by then, and which wait, is the transport's own affair;
all transports must come to the same, or a trace would not explain the real run.
"""

from __future__ import annotations

import torch

from distlab.runner import RankContext
from tests.corpora.programs.case import hangs, right

SHORT, LONG = 12, 12 * 1024  # elements; transports may go another way for many


def is_here(ctx: RankContext) -> bool:
    """All but the last rank but one, which is rank 0 where there are two."""
    return ctx.rank != ctx.world_size - 2


@right(3, gives=lambda rank, n: [[0.0, 5.0], [5.0, 5.0], [6.0, 6.0]][rank])
def late_for_a_broadcast(ctx: RankContext) -> list[float]:
    """Rank 1 comes when rank 2, through already, tells it; rank 2 changes its copy."""
    word, box = torch.zeros(1), torch.full((1,), 5.0 if ctx.rank == 0 else 0.0)
    if ctx.rank == 1:
        ctx.comm.recv(word, 2)
    ctx.comm.broadcast(box, 0)
    if ctx.rank == 2:
        word = box + 1
        ctx.comm.send(box, 1)
        box += 1
    return [float(word), float(box)]


@hangs(2, 3, 4, 5)
def barrier_without_one(ctx: RankContext) -> None:
    """Nobody gets through."""
    if is_here(ctx):
        ctx.comm.barrier()  # guilty


@hangs(3, 4)
def broadcast_without_one(ctx: RankContext) -> None:
    """Whoever has its copy and need not pass it on is through."""
    if is_here(ctx):
        ctx.comm.broadcast(torch.zeros(SHORT), 0)  # guilty


@hangs(3, 4)
def long_broadcast_without_one(ctx: RankContext) -> None:
    """The same with many elements."""
    if is_here(ctx):
        ctx.comm.broadcast(torch.zeros(LONG), 0)  # guilty


@hangs(3, 4, 5)
def broadcast_without_its_root(ctx: RankContext) -> None:
    """Everyone waits for the root, some of them through others."""
    if is_here(ctx):
        ctx.comm.broadcast(torch.zeros(SHORT), ctx.world_size - 2)  # guilty


@hangs(3, 4)
def reduce_without_one(ctx: RankContext) -> None:
    """The root lacks a share."""
    if is_here(ctx):
        ctx.comm.reduce(torch.zeros(SHORT), 0)  # guilty


@hangs(3, 4)
def long_reduce_without_one(ctx: RankContext) -> None:
    """The same with many elements."""
    if is_here(ctx):
        ctx.comm.reduce(torch.zeros(LONG), 0)  # guilty


@hangs(3, 4)
def reduce_without_its_root(ctx: RankContext) -> None:
    """Nobody takes the sum."""
    if is_here(ctx):
        ctx.comm.reduce(torch.zeros(SHORT), ctx.world_size - 2)  # guilty


@hangs(3, 4)
def all_reduce_without_one(ctx: RankContext) -> None:
    """Nobody has the sum."""
    if is_here(ctx):
        ctx.comm.all_reduce(torch.zeros(SHORT))  # guilty


@hangs(3, 4)
def long_all_reduce_without_one(ctx: RankContext) -> None:
    """The same with many elements."""
    if is_here(ctx):
        ctx.comm.all_reduce(torch.zeros(LONG))  # guilty


@hangs(3, 4)
def all_gather_without_one(ctx: RankContext) -> None:
    """Everyone lacks the same part."""
    if is_here(ctx):
        parts = torch.zeros(ctx.world_size * SHORT)
        ctx.comm.all_gather(parts, torch.zeros(SHORT))  # guilty


@hangs(3, 4)
def reduce_scatter_without_one(ctx: RankContext) -> None:
    """Everyone lacks the same share in its part of the sum."""
    if is_here(ctx):
        parts = torch.zeros(ctx.world_size * SHORT)
        ctx.comm.reduce_scatter(torch.zeros(SHORT), parts)  # guilty


@hangs(3, 4)
def all_to_all_without_one(ctx: RankContext) -> None:
    """Everyone has something for the one, and awaits something of it."""
    if is_here(ctx):
        parts = torch.zeros(ctx.world_size * SHORT)
        ctx.comm.all_to_all(torch.zeros_like(parts), parts)  # guilty
