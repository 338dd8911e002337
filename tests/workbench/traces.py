"""Runs made by hand and programs to simulate, for the tests of distlab.trace."""

from __future__ import annotations

from typing import Any

import torch

from distlab.runner import RankContext, RankRecord, Run

FILE = "template_collectives.py"


def event(kind: str, number: int, op: str, t: float = 0.0, **more: Any) -> Any:
    """A journal's event for the start of a call."""
    facts: dict[str, Any] = {
        "k": kind, "n": number, "op": op, "dst": None, "src": None, "tag": 0,
        "group": "world", "members": [0, 1, 2], "shape": [1], "dtype": "float32",
        "bytes": 4, "file": FILE, "line": 40 + number, "t": t,
    }  # fmt: skip
    return {**facts, **more}


def ended(number: int, t: float | None = None, **more: Any) -> Any:
    """A journal's event for the end of one."""
    return {"k": "exit", "n": number, "t": float(number) if t is None else t, **more}


def call(number: int, op: str, start: float, end: float, **more: Any) -> list[Any]:
    """Both of them, of a call that blocks."""
    return [event("enter", number, op, start, **more), ended(number, end)]


def run_of(*journals: list[dict[str, Any]], **more: Any) -> Run:
    """A run of real ranks with these journals."""
    ranks = []
    for rank, journal in enumerate(journals):
        record = RankRecord(rank=rank, journal=journal, status="finished")
        waiting = [call for call in record.open_calls() if call["k"] == "enter"]
        if waiting:
            record.status, record.waiting = "waiting", waiting[0]
        ranks.append(record)
    facts: dict[str, Any] = {"outcome": "finished", "seconds": 0.1, "limit_s": 10}
    return Run(world_size=len(ranks), ranks=tuple(ranks), **{**facts, **more})


def stuck_ring(size: int = 3, **more: Any) -> Run:
    """Everyone sends to the right, nobody receives."""
    journals = [
        [event("enter", 1, "send", dst=(r + 1) % size, **more)] for r in range(size)
    ]
    waits = {rank: ((rank + 1) % size,) for rank in range(size)}
    cycle = tuple(range(size))
    return run_of(*journals, outcome="deadlock", waits_for=waits, cycle=cycle)


def ring(context: RankContext, size: int) -> None:
    """Pass `size` numbers all the way round."""
    comm, n = context.comm, context.world_size
    box = torch.zeros(size)
    for _ in range(2 * (n - 1)):
        sending = comm.isend(torch.ones(size), (comm.rank + 1) % n)
        comm.recv(box, (comm.rank - 1) % n)
        sending.wait()


def star(context: RankContext, size: int) -> None:
    """Rank 0 takes a tensor of everyone, one after the other."""
    box = torch.zeros(size)
    for src in range(1, context.world_size):
        if context.rank == 0:
            context.comm.recv(box, src)
        elif context.rank == src:
            context.comm.send(box, 0)


def push(context: RankContext, size: int) -> None:
    """The same with all receives posted at once: they share one way in."""
    comm, others = context.comm, range(1, context.world_size)
    if context.rank:
        comm.send(torch.ones(size), 0)
    else:
        for work in [comm.irecv(torch.zeros(size), src) for src in others]:
            work.wait()


def talk(context: RankContext, pairs: list[tuple[int, int]]) -> None:
    """Messages between pairs of ranks, in this order."""
    for src, dst in pairs:
        if context.rank == src:
            context.comm.send(torch.ones(4), dst)
        elif context.rank == dst:
            context.comm.recv(torch.zeros(4), src)


def stand_still(context: RankContext) -> None:
    """Everyone sends first."""
    comm, n = context.comm, context.world_size
    comm.send(torch.ones(4), (comm.rank + 1) % n)
    comm.recv(torch.zeros(4), (comm.rank - 1) % n)
