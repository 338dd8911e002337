"""Programs that hang, for `benchmarks/hang.py`: each waits at the line marked `# HERE`.

Beside the learner's files in `tests/hostile/hangs.toml`, which know the course's tasks
only: groups, posted calls, any rank, and all the collectives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from distlab.comm import ANY
from distlab.runner import RankContext

Program = Callable[[RankContext], Any]


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A program, and one rank of those that wait: in this call, at the marked line."""

    program: Program
    world_size: int
    rank: int
    call: str

    @property
    def place(self) -> str:
        """`hangs.py:41`, where it waits."""
        lines, first = inspect.getsourcelines(self.program)
        number = next(i for i, text in enumerate(lines) if "# HERE" in text)
        return f"hangs.py:{first + number}"


def chain(ctx: RankContext) -> None:
    """Everyone waits for the next one, and the last one is done."""
    if ctx.rank < ctx.world_size - 1:
        ctx.comm.recv(torch.zeros(1), ctx.rank + 1)  # HERE


def ring_of_four(ctx: RankContext) -> None:
    """Four ranks send to the right, and only then would receive."""
    box = torch.zeros(8)
    ctx.comm.send(box, (ctx.rank + 1) % 4)  # HERE
    ctx.comm.recv(box, (ctx.rank - 1) % 4)


def from_anybody(ctx: RankContext) -> None:
    """Rank 0 takes a message of anybody, once more than anybody sends."""
    if ctx.rank:
        ctx.comm.send(torch.ones(1), 0)
        return
    for _ in range(ctx.world_size):
        ctx.comm.recv(torch.zeros(1), ANY)  # HERE


def posted(ctx: RankContext) -> None:
    """A receive is posted and waited for; nobody ever sends."""
    if ctx.rank == 0:
        ctx.comm.irecv(torch.zeros(2), 1).wait()  # HERE


def misses_the_barrier(ctx: RankContext) -> None:
    """Rank 2 leaves before the others meet."""
    if ctx.rank != 2:
        ctx.comm.barrier()  # HERE


def one_round_more(ctx: RankContext) -> None:
    """Rank 1 has one batch more than the others, as with data split unevenly."""
    for _ in range(3 + (ctx.rank == 1)):
        ctx.comm.all_reduce(torch.ones(4))  # HERE


def misses_the_gather(ctx: RankContext) -> None:
    """Rank 0 thinks that gathering is for the others."""
    if ctx.rank:
        ctx.comm.all_gather(torch.zeros(3), torch.ones(1))  # HERE


def half_a_group(ctx: RankContext) -> None:
    """In the group of ranks 0 and 1, rank 1 does not call."""
    pair = ctx.comm.new_group([0, 1])
    if pair is not None and ctx.rank == 0:
        pair.all_reduce(torch.ones(1))  # HERE


def large_and_slow(ctx: RankContext) -> None:
    """Each sends 64 MB to the other first: no buffer hides it."""
    box = torch.zeros(16_000_000)
    ctx.comm.send(box, 1 - ctx.rank)  # HERE
    ctx.comm.recv(box, 1 - ctx.rank)


HANGS = (
    Hang(program=chain, world_size=4, rank=2, call="recv ← 3"),
    Hang(program=ring_of_four, world_size=4, rank=3, call="send → 0"),
    Hang(program=from_anybody, world_size=3, rank=0, call="recv ← any rank"),
    Hang(program=posted, world_size=2, rank=0, call="irecv ← 1"),
    Hang(program=misses_the_barrier, world_size=3, rank=0, call="barrier"),
    Hang(program=one_round_more, world_size=2, rank=1, call="call #4 all_reduce"),
    Hang(program=misses_the_gather, world_size=3, rank=1, call="all_gather"),
    Hang(program=half_a_group, world_size=3, rank=0, call="all_reduce"),
    Hang(program=large_and_slow, world_size=2, rank=1, call="send → 0"),
)
