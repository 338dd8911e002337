"""Programs with collectives that are started and waited for later (async_op)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from distlab.comm import Comm, ReduceOp, Work
from distlab.runner import RankContext
from tests.workbench.conformance.programs import filled, loss, refusal, zeros

LONG = 3 << 19  # elements: more than the sockets hold

Start = Callable[..., Work | None]
STARTS: dict[str, Start] = {
    "all_reduce": lambda comm, size, **how: comm.all_reduce(
        filled(comm, 1, size), **how
    ),
    "all_gather": lambda comm, size, **how: comm.all_gather(
        zeros(comm, size * comm.world_size), filled(comm, 1, size), **how
    ),
    "reduce_scatter": lambda comm, size, **how: comm.reduce_scatter(
        zeros(comm, size), filled(comm, 1, size * comm.world_size), **how
    ),
    "all_to_all": lambda comm, size, **how: comm.all_to_all(
        zeros(comm, size * comm.world_size),
        filled(comm, 1, size * comm.world_size),
        **how,
    ),
}
"""Each on `size` elements of every rank."""
LIMITED = ("all_gather", "reduce_scatter", "all_to_all")


def _started(work: Work | None) -> Work:
    assert work is not None
    return work


def all_kinds_at_once(ctx: RankContext) -> dict[str, list[float]]:
    """Four collectives in flight, each waited for twice, the last one first."""
    comm, n = ctx.comm, ctx.world_size
    gathered, exchanged = zeros(comm, n, 2), zeros(comm, 2 * n)
    summed, averaged = zeros(comm, 3), zeros(comm, 3)
    whole = torch.arange(3.0 * n, device=comm.device) * (comm.rank + 1)
    numbers = [[10 * comm.rank + dst] * 2 for dst in range(n)]
    sent = torch.tensor(numbers).float().to(comm.device)
    mine = filled(comm, comm.rank + 1, 2)
    works = [
        comm.all_gather(gathered, mine, async_op=True),
        comm.reduce_scatter(summed, whole, async_op=True),
        comm.reduce_scatter(averaged, whole, ReduceOp.AVG, async_op=True),
        comm.all_to_all(exchanged, sent, async_op=True),
    ]
    for work in reversed(works):
        _started(work).wait()
    averaged += 0  # what came is the caller's again
    for work in works:
        _started(work).wait()  # once more must change nothing
    return {
        "gathered": gathered.flatten().tolist(),
        "summed": summed.tolist(),
        "averaged": averaged.tolist(),
        "exchanged": exchanged.tolist(),
    }


def between_a_start_and_its_wait(ctx: RankContext) -> list[float]:
    """Another collective, in between, does not get the first one's values."""
    comm, n = ctx.comm, ctx.world_size
    gathered, total = zeros(comm, n), filled(comm, 1, 1)
    work = comm.all_gather(gathered, filled(comm, comm.rank + 5, 1), async_op=True)
    comm.all_reduce(total)
    comm.barrier()
    _started(work).wait()
    return [float(total), *gathered.tolist()]


def blocking_gives_nothing(ctx: RankContext) -> list[bool]:
    """Without async_op there is no Work."""
    return [STARTS[name](ctx.comm, 2) is None for name in STARTS]


def refused_when_started(ctx: RankContext) -> dict[str, str]:
    """Each mistake once; afterwards the communicator still works."""
    comm, n = ctx.comm, ctx.world_size
    ints = zeros(comm, n, dtype=torch.int64)
    texts = {
        name: refusal(
            lambda name=name: STARTS[name](comm, 1, async_op=True, timeout_s=1)
        )  # type: ignore[misc]
        for name in LIMITED
    }
    texts["size"] = refusal(
        lambda: comm.all_gather(zeros(comm, 2 * n + 1), zeros(comm, 2), async_op=True)
    )
    texts["average"] = refusal(
        lambda: comm.reduce_scatter(
            zeros(comm, 1, dtype=torch.int64), ints, ReduceOp.AVG, async_op=True
        )
    )
    total = filled(comm, 1, 2)
    comm.all_reduce(total)
    return {**texts, "afterwards": str(int(total[0]))}


def nobody_else_comes(ctx: RankContext, op: str) -> dict[str, Any] | None:
    """Rank 0 starts one alone, and waits with a limit."""
    if ctx.rank:
        return None
    work = _started(STARTS[op](ctx.comm, 2, async_op=True))
    return loss(lambda: work.wait(0.15))


def one_never_comes(ctx: RankContext, op: str) -> None:
    """All but the last rank start, compute, and wait."""
    if ctx.rank == ctx.world_size - 1:
        return
    work = _started(STARTS[op](ctx.comm, 2, async_op=True))
    torch.ones(50, 50).square().sum()
    work.wait()


def goes_on_while_rank_zero_computes(ctx: RankContext, op: str, folder: str) -> bool:
    """Rank 0 starts and never waits; the others' collectives end all the same."""
    done = [Path(folder) / f"{op}{rank}" for rank in range(1, ctx.world_size)]
    if ctx.rank:
        STARTS[op](ctx.comm, LONG)
        done[ctx.rank - 1].touch()
        return True
    _started(STARTS[op](ctx.comm, LONG, async_op=True))
    end = time.monotonic() + 15
    while not all(path.exists() for path in done):
        if time.monotonic() > end:
            return False
        time.sleep(0.005)  # computing, as far as the transport can tell
    return True


def a_peer_is_gone(ctx: RankContext, op: str) -> None:
    """Rank 0 starts one with a rank whose process has ended; the wait says so."""
    comm = ctx.comm
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.05)
        os._exit(7)
    if comm.rank == 0:
        ctx.report(loss(lambda: _started(STARTS[op](comm, 2, async_op=True)).wait()))
        time.sleep(5)  # until the run is over


def in_virtual_time(ctx: RankContext, op: str, compute_s: float) -> list[float]:
    """Seconds of virtual time: to start, to compute, and until the wait is over."""
    comm: Comm = ctx.comm
    began_s = comm.time()
    work = _started(STARTS[op](comm, 1000, async_op=True))
    started_s = comm.time()
    ctx.clock.sleep(compute_s)
    work.wait()
    return [started_s - began_s, comm.time() - began_s]


def alone(ctx: RankContext, op: str) -> float:
    """Seconds of virtual time of the blocking call."""
    began_s = ctx.comm.time()
    STARTS[op](ctx.comm, 1000)
    return ctx.comm.time() - began_s
