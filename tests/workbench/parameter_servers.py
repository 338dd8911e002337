"""The parameter server as processes: what makes the servers, and their workers.

Two servers share the tensors of a model, balanced by bytes. Each push adds one to every
element, so the weights say how many pushes were applied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distlab.comm import ServiceContext
from distlab.given.parameter_server import Worker
from distlab.runner import RankContext
from solutions.phase3_multi_node.parameter_server import (
    DurableServer,
    StaleServer,
    assign_tensors,
)

WORKERS, NUM_PUSHES = 3, 6
LENGTHS = (5, 1, 3, 3)
SERVERS = ("server0", "server1")
PATIENCE_S = 0.5


def lengths_of(server: int) -> list[int]:
    """The lengths of the tensors of one server."""
    servers = assign_tensors([8 * length for length in LENGTHS], len(SERVERS))
    return [length for length, s in zip(LENGTHS, servers, strict=True) if s == server]


def zeros(server: int) -> Tensor:
    return torch.zeros(sum(lengths_of(server)), dtype=torch.float64)


def durable(context: ServiceContext, server: int) -> DurableServer:
    return DurableServer(zeros(server), WORKERS, -float(WORKERS), context.disk)


def bounded(context: ServiceContext) -> StaleServer:
    return StaleServer(zeros(0), WORKERS, -float(WORKERS), bound=1)


def push_to_both(ctx: RankContext, orders: list[str]) -> list[list[float]]:
    """Push a few times; rank 0 has something done to a server; then the weights."""
    assert ctx.endpoint
    assert ctx.store
    workers = [Worker(ctx.endpoint, ctx.clock, name, PATIENCE_S) for name in SERVERS]
    for number in range(NUM_PUSHES):
        for server, worker in enumerate(workers):
            worker.push(torch.ones_like(zeros(server)))
        if ctx.rank == 0 and number < len(orders):
            for order in orders[number].split(", "):
                ctx.report(order)
                ctx.clock.sleep(1.5 * PATIENCE_S)  # others repeat what they pushed
    ctx.store.set(f"pushed{ctx.rank}", b"")
    ctx.store.wait([f"pushed{rank}" for rank in range(WORKERS)])
    return [worker.pull().tolist() for worker in workers]


def die_or_go_on(ctx: RankContext) -> Any:
    """Rank 1 is killed after its first push; the bound must not hold up the others."""
    assert ctx.endpoint
    worker = Worker(ctx.endpoint, ctx.clock, "server0", PATIENCE_S)
    worker.push(torch.ones_like(zeros(0)))
    if ctx.rank == 1:
        ctx.report("kill 1")
        ctx.clock.sleep(60.0)
    for _ in range(NUM_PUSHES - 1):
        worker.pull()
        worker.push(torch.ones_like(zeros(0)))
    return worker.num_pushes
