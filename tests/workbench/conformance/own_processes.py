"""Services that are no rank's, deaths and restarts: programs for both sides, as before.

What is to happen to a process is reported ("restart ledger"). On real processes the
test does it then; in virtual time it happens at a time by which the program waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distlab.comm import Disk, ServiceContext
from distlab.comm.services import PeerGone, Started, Tick, WakeAt
from distlab.runner import RankContext
from tests.workbench.conformance.services import (
    PATIENCE_S,
    PAUSE_S,
    insist,
    meet,
    seams,
    what_is_raised,
)


class Ledger:
    """Appends what it is told to a log; `sync` makes it durable, `read` tells it."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._log = disk.read("log") if "log" in disk.names() else b""

    def handle(self, peer: int, message: bytes) -> bytes:
        if message == b"sync":
            self._disk.write("log", self._log)
            self._disk.sync("log")
            self._disk.sync_folder()
        elif message != b"read":
            self._log += message
        return self._log


def ledger(ctx: ServiceContext) -> Ledger:
    return Ledger(ctx.disk)


class Lease:
    """Has an owner until nothing is heard of him for a while, or he is gone."""

    LEASE_S = 0.1

    def __init__(self) -> None:
        self._is_over = False
        self.events: list[str] = []

    def handle(self, peer: int, message: bytes) -> bytes | None:
        if message == b"over?":
            return b"over" if self._is_over else None
        return ",".join(self.events).encode()

    def on(self, event: object, now_s: float) -> Sequence[object]:
        if isinstance(event, Started):
            self.events.append("started")
            return [WakeAt(now_s + self.LEASE_S)]
        if isinstance(event, Tick):
            self.events.append("tick")
            self._is_over = True
        if isinstance(event, PeerGone):
            self.events.append(f"gone {event.peer}")
        return []


def lease(ctx: ServiceContext) -> Lease:
    return Lease()


def a_service_by_its_name(ctx: RankContext) -> list[str]:
    _, endpoint = seams(ctx)
    if ctx.rank == 0:
        endpoint.call("ledger", b"a", PATIENCE_S)
        endpoint.call("ledger", b"b", PATIENCE_S)
    meet(ctx, "told")
    return [endpoint.call("ledger", b"read", PATIENCE_S).decode()]


def a_service_that_ticks(ctx: RankContext) -> list[str]:
    _, endpoint = seams(ctx)
    over = endpoint.call("lease", b"over?", PATIENCE_S).decode()
    told = endpoint.call("lease", b"events", PATIENCE_S).decode()
    meet(ctx, "over")
    return [over, told]


def restarted_service(ctx: RankContext) -> list[str]:
    """Killed and started again: what was synced is there, and nothing else."""
    store, endpoint = seams(ctx)
    if ctx.rank != 0:
        return [store.get("over").decode()]
    endpoint.call("ledger", b"ab", PATIENCE_S)
    endpoint.call("ledger", b"sync", PATIENCE_S)
    endpoint.call("ledger", b"c", PATIENCE_S)
    ctx.report("restart ledger")
    while insist(ctx, "ledger", b"read") != "ab":  # the old one knows of c
        ctx.clock.sleep(PAUSE_S)
    told = insist(ctx, "ledger", b"d")
    store.set("over", told.encode())
    return [told]


def restarted_rank(ctx: RankContext) -> list[str]:
    """Rank 0 serves in both of its lives; only its disk has come along."""
    store, endpoint = seams(ctx)
    assert ctx.disk
    if ctx.rank == 0:
        served = Ledger(ctx.disk)
        endpoint.serve(served.handle)
        store.get("over")
        return [f"life {store.add('lives', 1)}"]
    if ctx.rank == 1:
        for message in (b"x", b"sync", b"y"):
            endpoint.call(0, message, PATIENCE_S)
        ctx.report("restart 0")
        while insist(ctx, 0, b"read") != "x":
            ctx.clock.sleep(PAUSE_S)
        store.set("over", insist(ctx, 0, b"read").encode())
    return [store.get("over").decode()]


def killed_rank(ctx: RankContext) -> list[Any]:
    """Rank 1 dies; the others know it at once, and their results are whole."""
    store, endpoint = seams(ctx)
    if ctx.rank == 1:
        endpoint.serve(lambda peer, message: b"yes")
        store.get("never")
    store.add("asked", len(endpoint.call(1, b"alive?", PATIENCE_S)))
    while int(store.get("asked")) < 3 * (ctx.world_size - 1):
        ctx.clock.sleep(PAUSE_S)
    if ctx.rank == 0:
        ctx.report("kill 1")
    while what_is_raised(lambda: endpoint.call(1, b"?", PATIENCE_S)) == "nothing":
        ctx.clock.sleep(PAUSE_S)
    return [what_is_raised(lambda: endpoint.call(1, b"?", PATIENCE_S)), ctx.rank]


def frozen_rank(ctx: RankContext) -> list[str]:
    """While rank 1 is frozen nobody is answered; afterwards it goes on as it was."""
    store, endpoint = seams(ctx)
    if ctx.rank == 1:
        endpoint.serve(lambda peer, message: b"yes")
        store.get("over")
        return ["went on"]
    if ctx.rank != 0:
        store.get("over")
        return []
    ctx.report("freeze 1")
    while what_is_raised(lambda: endpoint.call(1, b"?", 0.1)) == "nothing":
        ctx.clock.sleep(PAUSE_S)
    ctx.report("thaw 1")
    reply = insist(ctx, 1, b"?")
    store.set("over", b"")
    return [reply]
