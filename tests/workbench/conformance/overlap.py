"""Programs for transports with processes: what goes on while a rank does not wait."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from distlab.comm import ANY, PeerLost, ReduceOp
from distlab.runner import RankContext

LONG = 4 << 20  # elements: more than the sockets hold


def _until(condition: Callable[[], bool]) -> bool:
    """Compute, as far as the transport can tell, until something is so."""
    end = time.monotonic() + 15
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def irecv_and_compute(ctx: RankContext, folder: str) -> bool:
    """Rank 1's long send ends though rank 0 posts its receive and never waits."""
    done, box = Path(folder) / "sent", torch.zeros(LONG)
    if ctx.rank == 0:
        ctx.comm.irecv(box, 1)
        return _until(done.exists)
    ctx.comm.send(box + 1, 0)
    done.touch()
    return True


def isend_and_compute(ctx: RankContext, folder: str) -> float:
    """A long isend arrives though its sender never waits."""
    done, box = Path(folder) / "received", torch.zeros(LONG)
    if ctx.rank == 0:
        ctx.comm.isend(torch.ones(LONG), 1)
        return float(_until(done.exists))
    ctx.comm.recv(box, 0)
    done.touch()
    return float(box.min())


def reduce_and_compute(ctx: RankContext, folder: str) -> float:
    """Rank 0 starts a reduction and never waits; the others' reductions end."""
    box, n = torch.ones(LONG), ctx.world_size
    done = [Path(folder) / f"reduced{rank}" for rank in range(1, n)]
    if ctx.rank == 0:
        ctx.comm.all_reduce(box, async_op=True)
        return float(_until(lambda: all(path.exists() for path in done)))
    ctx.comm.all_reduce(box)
    done[ctx.rank - 1].touch()
    return float(box.min())


def threads_wait_at_once(ctx: RankContext) -> list[float]:
    """Four threads of rank 0 wait for four tags, which come last to first."""
    comm, tags = ctx.comm, range(4)
    boxes = [torch.zeros(3) for _ in tags]
    if ctx.rank == 1:
        for tag in reversed(tags):
            time.sleep(0.01)
            comm.send(torch.full((3,), float(tag + 1)), 0, tag)
        return []
    threads = [threading.Thread(target=comm.recv, args=(boxes[t], 1, t)) for t in tags]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [float(box[0]) for box in boxes]


def thread_waits_while_another_sends(ctx: RankContext) -> list[float]:
    """A thread that sits in a recv does not keep the main thread's calls back."""
    comm, box = ctx.comm, torch.zeros(1)
    if ctx.rank == 0:
        waits = threading.Thread(target=comm.recv, args=(box, 1, 9))
        waits.start()
        for number in range(50):
            echo = torch.zeros(1)
            comm.sendrecv(torch.full((1,), float(number)), 1, echo, 1)
            assert float(echo) == number
        comm.send(box, 1, 8)
        waits.join()
        return [float(box)]
    for _ in range(50):
        comm.recv(box, 0)
        comm.send(box, 0)
    comm.recv(torch.zeros(1), 0, 8)
    comm.send(torch.full((1,), 5.0), 0, 9)
    return []


def a_stranger_to_the_ring_dies(ctx: RankContext) -> None:
    """Rank 3 of 4 dies; rank 1, which exchanges nothing with it, is told as well."""
    comm = ctx.comm
    comm.barrier()
    if ctx.rank == 3:
        time.sleep(0.05)
        os._exit(7)
    try:
        comm.all_reduce(torch.zeros(10_000))
    except PeerLost as error:
        ctx.report([error.rank, error.peer])
    time.sleep(5)


def a_group_is_given_up(ctx: RankContext) -> list[Any]:
    """Who gives up in a group is lost there, and not in the world."""
    comm, box = ctx.comm, torch.zeros(2)
    pair = comm.new_group([0, 1])
    lost = []
    if pair is not None:
        with contextlib.suppress(PeerLost):
            pair.recv(box, 1 - pair.rank, timeout_s=0.05)
        for call in (lambda: pair.send(box, 1 - pair.rank), pair.barrier):
            try:
                call()
            except PeerLost as error:
                lost.append(error.peer)
    comm.all_reduce(box.add_(1))
    return [*lost, float(box[0])]


def too_long_a_message(ctx: RankContext) -> str:
    if ctx.rank == 0:
        ctx.comm.send(torch.zeros(5), 1)
        return ""
    try:
        ctx.comm.recv(torch.zeros(4), 0)
    except RuntimeError as error:
        return str(error)
    return "received"


def sizes_differ(ctx: RankContext) -> None:
    ctx.comm.all_reduce(torch.zeros(4 + ctx.rank))


def any_and_one(ctx: RankContext) -> list[list[float]]:
    """From anyone, then from one, over and over: each takes what is its own."""
    comm, got = ctx.comm, []
    if ctx.rank:
        for turn in range(20):
            comm.send(torch.full((2,), float(ctx.rank + 10 * turn)), 0)
        return []
    left = [20] * ctx.world_size
    for turn in range(20 * (ctx.world_size - 1)):
        box = torch.zeros(2)
        open_ones = [rank for rank in range(1, ctx.world_size) if left[rank]]
        src = comm.recv(box, ANY if turn % 2 else open_ones[0])
        got.append([src, float(box[1]), 20 - left[src]])
        left[src] -= 1
    return got


def isend_to_one_who_takes_any(ctx: RankContext) -> float:
    """That rank 1 takes what comes stands on the line, unread, when rank 0 sends."""
    box = torch.full((2,), 5.0)
    if ctx.rank:
        assert ctx.comm.recv(box.zero_()) == 0
        ctx.comm.recv(box, 0)
    else:
        time.sleep(0.05)
        ctx.comm.isend(box, 1).wait()
        ctx.comm.send(box + 1, 1)
    return float(box[1])


def in_inference_mode(ctx: RankContext) -> float:
    """A reduction that the standby carries on sees tensors as their caller does."""
    with torch.inference_mode():
        box = torch.full((2000,), float(ctx.rank))
        work = ctx.comm.all_reduce(box, ReduceOp.MAX, async_op=True)
        assert work is not None
        time.sleep(0.02)
        work.wait()
        return float(box.sum())
