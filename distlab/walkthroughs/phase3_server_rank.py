"""Run on a rank for the parameter server sections of phase 3's lab.

The server is the learner's and runs in virtual time, and its workers are simulated
ranks. `unit` is the learner's module, as in `phase3_rank`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from distlab.comm import PeerLost, ServiceContext
from distlab.data.digits import load_digits_split
from distlab.given.parameter_server import PULL, PUSH
from distlab.grading.checks.parameter_server.messages import CODEC, message
from distlab.grading.kit.services import NET, SERVICE
from distlab.runner import RankContext
from distlab.sim import AlphaBeta, Faults, parse_faults, run

SLOW_LINK = AlphaBeta(alpha_s=10e-6, bytes_per_s=1.25e9)
"""10 Gbit/s."""
CLASSES = 10
TRAVEL_S = 0.1  # longer than a few messages on NET take

# ── a step of a synchronous parameter server, with its tensors on several ───────────


def step_times(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    sizes: tuple[int, ...],
    counts: tuple[int, ...],
    num_workers: int,
) -> list[dict[str, float]]:
    """Return virtual seconds of a step, by number of servers and way to assign tensors.

    In a step, each worker pushes and pulls all tensors. `sizes` are bytes.
    """
    rows = []
    for count in counts:
        in_turn = [index % count for index in range(len(sizes))]
        ways = {"in turn": in_turn, "yours": unit.assign_tensors([*sizes], count)}
        row = {}
        for name, servers in ways.items():
            loads = [0] * count
            for size, server in zip(sizes, servers, strict=True):
                loads[server] += size
            row[name] = _step_s(unit, loads, num_workers)
        rows.append(row)
    return rows


def _step_s(unit: ModuleType, loads: Sequence[int], num_workers: int) -> float:
    def serve(num_bytes: int) -> Callable[[ServiceContext], Any]:
        weights = torch.zeros(num_bytes // 8, dtype=torch.float64)
        return lambda _: unit.SyncServer(weights, num_workers, 1.0)

    pushes = [message(PUSH, 1, [1.0] * (load // 8)) for load in loads]
    pulls = [message(PULL, 1)] * len(loads)

    def work(context: RankContext) -> float:
        """Begin with another server than the other workers do, so that all are busy."""
        assert context.endpoint
        for requests in (pushes, pulls):
            for turn in range(len(loads)):
                server = (context.rank + turn) % len(loads)
                context.endpoint.call(f"server{server}", requests[server], math.inf)
        return context.clock.now_s()

    services = {f"server{server}": serve(load) for server, load in enumerate(loads)}
    done = run(
        work, num_workers, net=SLOW_LINK, services=services, journal=False, trace=False
    )
    done.require_finished()
    return float(max(done.values))


# ── workers of different speed ──────────────────────────────────────────────────────


class _Watched:
    """A server that we look at after each push."""

    def __init__(self, server: Any, clock: Any, look: Callable[[float, Any], None]):
        self._server, self._clock, self._look = server, clock, look

    def handle(self, peer: int, request: bytes) -> bytes | None:
        """See `Handle`."""
        reply: bytes | None = self._server.handle(peer, request)
        if CODEC.request(request)[0] == PUSH:
            self._look(self._clock.now_s(), self._server)
        return reply


class _WatchedEvents(_Watched):
    """The same for a server that has `on`."""

    def on(self, event: object, now_s: float) -> Sequence[object]:
        """See `Reacts.on`."""
        actions: Sequence[object] = self._server.on(event, now_s)
        return actions


def work_for(
    make: Callable[[], Any],
    seconds: Sequence[float],
    gradient: Callable[[int, Tensor], Tensor],
    end_s: float,
    look: Callable[[float, Any], None],
    faults: Faults | None = None,
) -> None:
    """Let workers pull, compute for their number of seconds, and push, until `end_s`.

    Raises:
        RunnerError: the server raised.
    """

    def compute(context: RankContext) -> None:
        assert context.endpoint
        clock, number = context.clock, 0
        while True:
            left_s = max(end_s - clock.now_s(), 0.0)
            try:
                request = message(PULL, number)
                pulled = context.endpoint.call(SERVICE, request, left_s)
            except PeerLost:
                return
            weights = torch.tensor(CODEC.reply(pulled), dtype=torch.float64)
            clock.sleep(seconds[context.rank])
            if clock.now_s() > end_s:
                return
            number += 1
            pushed = message(PUSH, number, gradient(context.rank, weights).tolist())
            context.endpoint.call(SERVICE, pushed, math.inf)

    def factory(context: ServiceContext) -> Any:
        server = make()
        kind = _WatchedEvents if hasattr(server, "on") else _Watched
        return kind(server, context.clock, look)

    done = run(
        compute,
        len(seconds),
        net=NET,
        services={SERVICE: factory},
        faults=faults,
        journal=False,
        trace=False,
    )
    if done.outcome == "raised":
        done.require_finished()


def losses(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    bounds: tuple[int | None, ...],
    seconds: tuple[float, ...],
    is_sorted: bool,
    times_s: tuple[float, ...],
    lr: float,
) -> list[dict[str, list[float]]]:
    """Return pushes and the loss on the digits, for each bound at each of these times.

    The model is one layer. Each worker has its own samples, either sorted by digit or
    shuffled. The second loss is the one on the samples of worker 0.
    """
    digits = load_digits_split()
    inputs, targets = digits.train_inputs, digits.train_targets
    order = (
        torch.argsort(targets, stable=True) if is_sorted else torch.arange(len(targets))
    )
    shards = [
        (inputs[rows], targets[rows]) for rows in order.tensor_split(len(seconds))
    ]

    def gradient(rank: int, weights: Tensor) -> Tensor:
        own, wanted = shards[rank]
        errors = torch.softmax(own @ weights.view(-1, CLASSES), 1)
        errors[range(len(wanted)), wanted] -= 1
        return (own.T @ errors / len(wanted)).flatten()

    results = []
    for bound in bounds:
        start = torch.zeros(inputs.shape[1] * CLASSES, dtype=torch.float64)
        seen = [(0.0, 0, start)]

        def make(bound: int | None = bound, start: Tensor = start) -> Any:
            return unit.StaleServer(start, len(seconds), lr, bound)

        def look(now_s: float, server: Any, seen: list[Any] = seen) -> None:
            seen.append((now_s, sum(server.clocks), server.weights.clone()))

        work_for(make, seconds, gradient, times_s[-1] + TRAVEL_S, look)
        row: dict[str, list[float]] = {"pushes": [], "all": [], "worker 0": []}
        for time_s in times_s:
            _, pushes, weights = [x for x in seen if x[0] <= time_s + TRAVEL_S][-1]
            layer = weights.view(-1, CLASSES)
            row["pushes"].append(pushes)
            row["all"].append(float(cross_entropy(inputs @ layer, targets)))
            own, wanted = shards[0]
            row["worker 0"].append(float(cross_entropy(own @ layer, wanted)))
        results.append(row)
    return results


def pushes_under(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    bounds: tuple[int | None, ...],
    seconds: tuple[float, ...],
    faults: tuple[str, ...],
    end_s: float,
) -> list[list[int]]:
    """Return the pushes in `end_s` seconds for each fault, by server.

    Faults are written as for `--fault`. The first server is the SyncServer, followed by
    one for each bound.
    """

    def count(make: Callable[[], Any], fault: str) -> int:
        times: list[float] = []
        work_for(
            make,
            seconds,
            lambda rank, weights: weights,
            end_s + TRAVEL_S,
            lambda now_s, server: times.append(now_s),
            parse_faults(fault) if fault else None,
        )
        return len(times)

    n, nothing = len(seconds), torch.zeros(1, dtype=torch.float64)
    servers = [
        partial(unit.SyncServer, nothing, n, 1.0),
        *(partial(unit.StaleServer, nothing, n, 1.0, bound) for bound in bounds),
    ]
    return [[count(make, fault) for make in servers] for fault in faults]
