"""Programs and services that die, or are made to, for the tests of the runner."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import torch

from distlab.comm import CommRefusedError, PeerLost, ServiceContext
from distlab.grading.guard import doors_of, install, resolved
from distlab.runner import RankContext
from tests.workbench.conformance import own_processes, services

ROOT = Path(__file__).parents[3]
PATIENCE_S = 20.0
MORTAL = 1  # the rank that dies, where one does


def sums_before_and_after(ctx: RankContext) -> list[float]:
    """All add up; rank 1 dies; the others learn of it and go on with each other."""
    comm, total = ctx.comm, torch.full((3,), float(ctx.rank + 1))
    comm.all_reduce(total)
    if ctx.rank == MORTAL:
        for src in (0, 2):  # they have the sum too: none of it is lost with this rank
            comm.recv(torch.zeros(1), src)
        ctx.report("kill 1")
        time.sleep(PATIENCE_S)
    comm.send(torch.zeros(1), MORTAL)
    try:
        comm.all_reduce(torch.ones(3))
    except PeerLost:
        other = torch.full((3,), float(ctx.rank))
        comm.sendrecv(other.clone(), 2 - ctx.rank, other, 2 - ctx.rank)
        return [float(total[0]), float(other[2])]
    return []


def dies_by_itself(ctx: RankContext) -> str:
    assert ctx.store
    assert ctx.endpoint
    if ctx.rank == MORTAL:  # gloo connects one rank after the other
        ctx.store.wait(["connected"])
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.store.set("connected", b"")
    try:
        ctx.endpoint.call(MORTAL, b"?", PATIENCE_S)
    except PeerLost:
        return "lost"
    return "answered"


def raises(ctx: RankContext) -> None:
    if ctx.rank == MORTAL:
        raise KeyError("momentum")


def kills(ctx: RankContext, whom: str) -> None:
    ctx.report(f"kill {whom}")
    time.sleep(PATIENCE_S)


def deadlock_beside_a_death(ctx: RankContext) -> None:
    """Rank 1 dies as declared; ranks 0 and 2 wait for each other."""
    if ctx.rank == MORTAL:
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.comm.recv(torch.zeros(1), 2 - ctx.rank)


def second_life(ctx: RankContext) -> list[Any]:
    """What a rank has that was started again, and what it has no more."""
    assert ctx.store
    assert ctx.disk
    lives = ctx.store.add(f"lives of {ctx.rank}", 1)
    if ctx.rank == 0 and lives == 1:
        ctx.disk.write("kept", b"first life")
        ctx.disk.sync("kept")
        if os.fork() == 0:  # a child, which keeps the listener open
            time.sleep(PATIENCE_S)
            os._exit(0)
        ctx.report("restart 0")
        time.sleep(PATIENCE_S)
    if ctx.rank == 0:
        assert ctx.endpoint
        ctx.endpoint.serve(lambda peer, message: b"second")
        ctx.store.get("over")
        try:
            ctx.comm.barrier()
        except CommRefusedError as error:
            return [ctx.disk.read("kept").decode(), ctx.rank, str(error)]
        return []
    replies = {services.insist(ctx, 0, b"?") for _ in range(20)}
    ctx.store.set("over", b"")
    return sorted(replies)


def under_guard(ctx: RankContext) -> list[Any]:
    """The restarted service of the conformance programs, by a guarded rank."""
    protected = resolved([str(ROOT)], [str(ROOT / "solutions")])
    install(**protected, doors=doors_of(ctx))
    told: list[Any] = own_processes.restarted_service(ctx)
    with socket.socket() as elsewhere:
        told.append(services.what_is_raised(lambda: elsewhere.bind(("127.0.0.1", 0))))
        told.append(
            services.what_is_raised(lambda: elsewhere.connect(("127.0.0.1", 9)))
        )
    return told


def asks_the_service(ctx: RankContext, name: str) -> str:
    assert ctx.endpoint
    return ctx.endpoint.call(name, b"?", PATIENCE_S).decode()


class Mortal:
    def handle(self, peer: int, message: bytes) -> bytes:
        os.kill(os.getpid(), signal.SIGKILL)
        return b""


def mortal(ctx: ServiceContext) -> Mortal:
    return Mortal()


def cannot_be_made(ctx: ServiceContext, text: str) -> Mortal:
    raise ValueError(text)


def large(ctx: RankContext) -> int:
    """A message of more than the usual MiB."""
    assert ctx.endpoint
    if ctx.rank == 0:
        ctx.endpoint.serve(lambda peer, message: message)
    size = len(ctx.endpoint.call(0, bytes(3 << 20), PATIENCE_S))
    services.meet(ctx, "over")
    return size
