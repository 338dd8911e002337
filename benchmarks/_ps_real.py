"""The runs of `benchmarks/ps.py` on processes: eight workers, two servers, and faults.

    workers 0 … 4   healthy
    worker 5        frozen by SIGSTOP, and thawed later
    worker 6        killed by SIGKILL
    worker 7        five times slower
    server 0, 1     killed by SIGKILL and started again on their disks, each twice

What a gradient takes is declared: a sleep. Faults come when worker 0 has made so many
pushes, so every run has them at the same point of its work.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks._ps_servers import bounded, durable
from benchmarks._ps_work import ACKED, Plan, Row, on_processes
from distlab.runner import Cluster, Limits

SERVERS = ("server0", "server1")
WORKERS, HEALTHY = 8, (0, 1, 2, 3, 4)
FROZEN, KILLED, SLOW = 5, 6, 7
SLOWER, PATIENCE_S = 5, 1.0
ASYNC_S, SSP_S = 0.4, 0.15  # for a gradient: messages must take little beside it
BOUND, LEASE_S = 3, 30.0  # a lease outlasts any stall of a busy machine
LIMITS = Limits(seconds=240)
Order = tuple[int, str, int | str]
"""After so many pushes of worker 0: what is done, and to whom."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A run to be made: who makes the servers, what workers do, what is done to them.

    A frozen worker is thawed by an order, or `thaw_after_s` after it was frozen, where
    the others wait for it.
    """

    make: Callable[..., Any]
    plan: Plan
    orders: tuple[Order, ...] = ()
    thaw_after_s: float = 0.0


@dataclass
class Seen:
    """What came of a run."""

    plan: Plan
    rows: list[Row] = field(default_factory=list)
    killed: dict[int, float] = field(default_factory=dict)  # rank: time
    restarts: int = 0
    outcome: str = ""
    explanation: str = ""


def plan(
    seconds: Sequence[float], pushes: Sequence[int], bound: int | None = None
) -> Plan:
    """What travels to the processes."""
    return {
        "servers": list(SERVERS),
        "seconds": list(seconds),
        "pushes": list(pushes),
        "patience_s": PATIENCE_S,
        "dies": [],
        "end_s": None,
        "bound": bound,
        "lease_s": LEASE_S,
    }


def _seconds(compute_s: float, slower: float = 1) -> list[float]:
    return [compute_s] * (WORKERS - 1) + [compute_s * slower]


def limits_per_s(num_asynchronous: int, num_ssp: int) -> dict[str, float]:
    """Pushes per second of the healthy workers, if messages took no time.

    With the bound, push k begins when the slowest worker has made k - 1 - bound.
    """
    waits_s = SLOWER * SSP_S * max(0, num_ssp - 1 - BOUND)
    return {
        "asynchronous": len(HEALTHY) / ASYNC_S,
        "ssp": len(HEALTHY) * num_ssp / (waits_s + SSP_S),
    }


def asynchronous(num_pushes: int) -> tuple[Scene, Scene]:
    """Without faults, and with all of them; nobody waits for anybody.

    Here the slow worker is one of the faults. The frozen one is thawed at the end.
    """
    fewer = [num_pushes] * FROZEN + [num_pushes * 2 // 5, num_pushes, num_pushes // 5]
    clean = plan(_seconds(ASYNC_S), [num_pushes] * WORKERS)
    return Scene(make=durable, plan=clean), Scene(
        make=durable,
        plan=plan(_seconds(ASYNC_S, SLOWER), fewer),
        orders=_orders(num_pushes, thaw_at=num_pushes - 1),
    )


def ssp(num_pushes: int) -> tuple[Scene, Scene]:
    """Without faults, and with all of them; nobody is more than the bound ahead.

    The bound makes everybody as slow as the slowest worker, so that one is in both. The
    worker is frozen for less than the bound covers.
    """
    same = plan(_seconds(SSP_S, SLOWER), [num_pushes] * WORKERS, BOUND)
    frozen_at = num_pushes // 4
    return Scene(make=bounded, plan=same), Scene(
        make=bounded,
        plan=same,
        orders=_orders(num_pushes, thaw_at=frozen_at + BOUND - 1),
    )


def held_up(num_pushes: int, seconds: float) -> Scene:
    """SSP, all equally fast; one is frozen for longer than the bound covers."""
    return Scene(
        make=bounded,
        plan=plan(_seconds(SSP_S), [num_pushes] * WORKERS, BOUND),
        orders=((num_pushes // 2, "freeze", FROZEN),),
        thaw_after_s=seconds,
    )


def _orders(num_pushes: int, *, thaw_at: int) -> tuple[Order, ...]:
    quarter = num_pushes // 4
    return (
        (max(1, quarter - 2), "restart", "server0"),
        (quarter, "freeze", FROZEN),
        (quarter + 1, "restart", "server1"),  # while it is frozen
        (thaw_at, "thaw", FROZEN),
        (2 * quarter, "kill", KILLED),
        (3 * quarter, "restart", "server0"),  # it must know who was killed
        (3 * quarter + 1, "restart", "server1"),
    )


def played(cluster: Cluster, scene: Scene) -> Seen:
    """One run."""
    dies = [whom for _, what, whom in scene.orders if what == "kill"]
    seen = Seen({**scene.plan, "dies": dies})
    orders, timers = list(scene.orders), []

    def obey(what: str, whom: int | str) -> None:
        now_s = time.monotonic()
        if what == "kill" and isinstance(whom, int):
            seen.killed[whom] = now_s
        if what == "freeze" and isinstance(whom, int) and scene.thaw_after_s:
            timers.append(
                threading.Timer(scene.thaw_after_s, cluster.thaw, args=(whom,))
            )
            timers[-1].start()
        seen.restarts += what == "restart"
        getattr(cluster, what)(whom)

    def look(_rank: int, row: Row) -> None:
        seen.rows.append(row)
        if row[0] == ACKED and row[1:3] == [0, len(SERVERS) - 1]:
            for order in [order for order in orders if order[0] <= row[3]]:
                orders.remove(order)
                obey(order[1], order[2])

    try:
        run = cluster.run(
            on_processes,
            WORKERS,
            seen.plan,
            limits=LIMITS,
            on_report=look,
            backend="tcp",
            journal=False,
            services=dict.fromkeys(SERVERS, (scene.make, seen.plan)),
            may_die=(*dies, *SERVERS),
        )
    finally:
        for timer in timers:
            timer.cancel()
    seen.outcome, seen.explanation = run.outcome, run.explanation
    return seen
