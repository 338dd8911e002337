"""Programs that hang, fail or end oddly, and what must be alike wherever they run.

Each is a function of a `RankContext`; it says what must become of it, and on how many
ranks. They are a part of the corpus, which stands in `tests/corpora/programs`.
"""

from __future__ import annotations

import contextlib

import torch

from distlab.comm import ANY, PeerLost, PointToPointOnly
from distlab.runner import RankContext
from tests.corpora.programs.case import flawed, hangs, raises, right


def _box(size: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype)


def _neighbors(ctx: RankContext) -> tuple[int, int]:
    return (ctx.rank - 1) % ctx.world_size, (ctx.rank + 1) % ctx.world_size


@hangs(2, 3, 5)
def ring_of_sends(ctx: RankContext) -> None:
    left, right = _neighbors(ctx)
    ctx.comm.send(_box(), right)  # guilty
    ctx.comm.recv(_box(), left)


@hangs(2, 3, 5)
def ring_of_recvs(ctx: RankContext) -> None:
    left, right = _neighbors(ctx)
    ctx.comm.recv(_box(), left)  # guilty
    ctx.comm.send(_box(), right)


@right(2, 3, 5, gives=lambda rank, n: float(rank or n))
def ring_but_one_turns(ctx: RankContext) -> float:
    """Right: rank 0 sends first, all others receive first."""
    left, right = _neighbors(ctx)
    box = _box()
    if ctx.rank == 0:
        ctx.comm.send(box + 1, right)
        ctx.comm.recv(box, left)
    else:
        ctx.comm.recv(box, left)
        ctx.comm.send(box + 1, right)
    return float(box[0])


@right(2, 3, 4, 5, gives=lambda rank, n: float((rank - 1) % n))
def odd_even(ctx: RankContext) -> float:
    """Even ranks send first: two even neighbors meet where n is odd, and still go."""
    left, right = _neighbors(ctx)
    box = _box()
    if ctx.rank % 2 == 0:
        ctx.comm.send(_box() + ctx.rank, right)
        ctx.comm.recv(box, left)
    else:
        ctx.comm.recv(box, left)
        ctx.comm.send(_box() + ctx.rank, right)
    return float(box[0])


@hangs(2, 3)
def waits_before_receiving(ctx: RankContext) -> None:
    left, right = _neighbors(ctx)
    work = ctx.comm.isend(_box(), right)
    work.wait()  # guilty
    ctx.comm.recv(_box(), left)


@right(2, 4, gives=lambda rank, n: float((rank - 1) % n))
def waits_after_receiving(ctx: RankContext) -> float:
    left, right = _neighbors(ctx)
    work, box = ctx.comm.isend(_box() + ctx.rank, right), _box()
    ctx.comm.recv(box, left)
    work.wait()
    return float(box[0])


@hangs(2, 3)
def irecv_waited_first(ctx: RankContext) -> None:
    left, right = _neighbors(ctx)
    ctx.comm.irecv(_box(), left).wait()  # guilty
    ctx.comm.send(_box(), right)


@hangs(2, 3)
def one_receives_too_much(ctx: RankContext) -> None:
    if ctx.rank == 0:
        for src in range(1, ctx.world_size):
            ctx.comm.recv(_box(), src)
        ctx.comm.recv(_box(), 1)  # guilty
    else:
        ctx.comm.send(_box(), 0)


@hangs(2, 3, 4)
def last_rank_forgotten(ctx: RankContext) -> None:
    if ctx.rank == 0:
        for dst in range(1, ctx.world_size - 1):
            ctx.comm.send(_box(), dst)
    else:
        ctx.comm.recv(_box(), 0)  # guilty


@hangs(2, 3)
def wrong_tag(ctx: RankContext) -> None:
    if ctx.rank == 0:
        ctx.comm.send(_box(), 1, tag=3)
    elif ctx.rank == 1:
        ctx.comm.recv(_box(), 0, tag=4)  # guilty


@hangs(3, 4)
def wrong_source(ctx: RankContext) -> None:
    """Rank 0 sends to 1, which listens to the last rank."""
    if ctx.rank == 0:
        ctx.comm.send(_box(), 1)
    elif ctx.rank == 1:
        ctx.comm.recv(_box(), ctx.world_size - 1)  # guilty


@hangs(2, 3)
def any_of_nobody(ctx: RankContext) -> None:
    if ctx.rank == 0:
        for _ in range(ctx.world_size):  # one more than there are others
            ctx.comm.recv(_box(), ANY)  # guilty
    else:
        ctx.comm.send(_box(), 0)


@hangs(2, 3)
def all_receive_from_anyone(ctx: RankContext) -> None:
    ctx.comm.recv(_box(), ANY)  # guilty


@hangs(2, 3, 4)
def sendrecv_one_leaves_out(ctx: RankContext) -> None:
    left, right = _neighbors(ctx)
    if ctx.rank != 1:
        ctx.comm.sendrecv(_box(), right, _box(), left)  # guilty


@right(2, gives=lambda rank, n: None)
@hangs(3)
def sendrecv_both_to_the_left(ctx: RankContext) -> None:
    left, _ = _neighbors(ctx)
    ctx.comm.sendrecv(_box(), left, _box(), left)  # guilty


@hangs(2, 3)
def one_skips_the_barrier(ctx: RankContext) -> None:
    if ctx.rank != 1:
        ctx.comm.barrier()  # guilty


@hangs(2, 3)
def different_collectives(ctx: RankContext) -> None:
    if ctx.rank == 0:
        ctx.comm.barrier()  # guilty
    else:
        ctx.comm.all_reduce(_box())


@hangs(2, 3, 4)
def different_roots(ctx: RankContext) -> None:
    ctx.comm.broadcast(_box(), src=ctx.rank % 2)  # guilty


@raises("KeyError", 2, 3)
def one_raises(ctx: RankContext) -> None:
    if ctx.rank == 1:
        raise KeyError("momentum")  # guilty
    if ctx.rank == 0:
        ctx.comm.recv(_box(), 1)


@raises("ZeroDivisionError", 2, 3)
def all_raise(ctx: RankContext) -> None:
    raise ZeroDivisionError("all alike")  # guilty


@raises("ValueError", 2)
def raises_after_a_message(ctx: RankContext) -> None:
    """Both fail, in any order: rank 0 gives up on rank 1, which raises of itself.

    Rank 0 has a reply before it can give up: rank 1 needs nothing more of it.
    """
    if ctx.rank == 1:
        ctx.comm.recv(_box(), 0)
        ctx.comm.send(_box(), 0)
        raise ValueError("first")  # guilty
    if ctx.rank == 0:
        ctx.comm.send(_box(), 1)
        ctx.comm.recv(_box(), 1)
        ctx.comm.recv(_box(), 1, timeout_s=0.05)


@raises("SystemExit", 2, 3)
def exits(ctx: RankContext) -> None:
    if ctx.rank == 1:
        raise SystemExit(3)  # guilty


@raises("CommRefusedError", 2, 3)
def no_such_rank(ctx: RankContext) -> None:
    ctx.comm.send(_box(), ctx.rank + 1)  # guilty


@raises("CommRefusedError", 2, 3)
def sends_to_itself(ctx: RankContext) -> None:
    for dst in range(ctx.world_size):
        ctx.comm.send(_box(), dst)  # guilty


@raises("CommRefusedError", 2)
def collective_refused(ctx: RankContext) -> None:
    PointToPointOnly(ctx.comm).all_reduce(_box())  # guilty


@hangs(2, 3)
def catches_a_refusal(ctx: RankContext) -> None:
    """The refused call takes no part in the matching."""
    _left, right = _neighbors(ctx)
    with contextlib.suppress(ValueError):
        ctx.comm.send(_box(), ctx.rank)
    ctx.comm.send(_box(), right)  # guilty


@flawed("mismatched-buffers", 2)
def unlike_dtypes(ctx: RankContext) -> None:
    if ctx.rank == 0:
        ctx.comm.send(_box(4, torch.float32), 1)
    elif ctx.rank == 1:
        ctx.comm.recv(_box(4, torch.float64), 0)  # guilty


@flawed("mismatched-buffers", 2)
def too_small_a_message(ctx: RankContext) -> None:
    if ctx.rank == 0:
        ctx.comm.send(_box(2), 1)
    elif ctx.rank == 1:
        ctx.comm.recv(_box(4), 0)  # guilty


@flawed("never-waited", 2)
def never_waited(ctx: RankContext) -> None:
    if ctx.rank == 0:
        ctx.comm.isend(_box(), 1)  # guilty
    elif ctx.rank == 1:
        ctx.comm.recv(_box(), 0)


@right(2, gives=lambda rank, n: f"lost {1 - rank}")
def gives_up_then_goes_on(ctx: RankContext) -> str:
    """Who gives up has closed its line: it is lost for good, also to others."""
    if ctx.rank == 0:
        with contextlib.suppress(PeerLost):
            ctx.comm.recv(_box(), 1, timeout_s=0.1)
        try:
            ctx.comm.send(_box(), 1)
        except PeerLost as error:
            return f"lost {error.peer}"
        return "sent"
    if ctx.rank == 1:
        try:
            ctx.comm.recv(_box(), 0)
        except PeerLost as error:
            return f"lost {error.peer}"
        return "received"
    return ""


@hangs(3)
def subgroup_hangs(ctx: RankContext) -> None:
    """Members are named by their rank in the world."""
    pair = ctx.comm.new_group([2, 1])
    if pair is not None:
        pair.recv(_box(), 1 - pair.rank)  # guilty


@right(2, 4, gives=lambda rank, n: None)
@hangs(3, 5)
def tree_without_its_last(ctx: RankContext) -> None:
    """A broadcast by doubling that is right for powers of two only."""
    rank, n, reach = ctx.rank, ctx.world_size, 1
    while reach < n:
        if rank < reach:
            ctx.comm.send(_box(), (rank + reach) % n)  # guilty
        elif rank < 2 * reach:
            ctx.comm.recv(_box(), rank - reach)
        reach *= 2
