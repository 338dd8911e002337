"""Checks of 3.19, `parameter_server.sync`: balanced tensors, steps that all take."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from distlab.grading.checks.parameter_server.messages import (
    CODEC,
    PULL,
    PUSH,
    Move,
    ask,
    close,
    drawn_order,
    gradient_of,
    shown,
    times,
    words,
)
from distlab.grading.clause import clause
from distlab.grading.kit.plans import disturb, in_call, worked_out
from distlab.grading.kit.services import first_difference, last_rows, played_by_hand
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY, Evidence

CASES: tuple[tuple[list[int], int], ...] = (
    *(([2, 2, 2, 3, 3], 2), ([5, 1], 3), ([8, 8, 8, 8], 2), ([1, 1, 1, 1, 9], 3)),
    *(([], 2), ([7], 1), ([4_000_000, 64, 64, 2_000_000, 2_000_000, 512], 2)),
    ([3, 1, 3, 1, 3, 1, 3, 1], 2),
)
"""(sizes, num_servers): in alternation, one that is larger than all others, none."""
WEIGHTS, LR = [10.0, -20.0], 0.5
NUM_STEPS = 3
_TIMEOUT_S = 5.0


def cases(seed: int) -> list[tuple[list[int], int]]:
    """Those above, and some that depend on the seed."""
    draw = random.Random(seed)
    drawn = [
        ([draw.randint(1, 60) for _ in range(draw.randint(3, 20))], draw.randint(2, 5))
        for _ in range(12)
    ]
    return [*CASES, *drawn]


# ── C1, C2 ──────────────────────────────────────────────────────────────────────────


def assign(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """The servers of each case, as three ranks compute them."""
    found: list[Any] = []
    for sizes, num_servers in cases(seed):
        with in_call(f"assign_tensors({sizes}, {num_servers})"):
            of_ranks = []
            for rank in range(3):
                disturb(unit, rank)
                of_ranks.append(read(unit.assign_tensors(list(sizes), num_servers)))
            found.append(of_ranks)
    return found


def read(value: Any) -> list[int] | str:
    """A list of integers, or what it is instead."""
    if value is None:
        return "returns None: is a return missing?"
    try:
        return [operator.index(server) for server in value]
    except TypeError:
        return f"returns {value!r:.50}, not a list of server numbers"


def _assigned(runs: Runs) -> Iterator[tuple[str, list[int], int, list[Any]]]:
    found = worked_out(runs, assign).values[0]
    for (sizes, num_servers), of_ranks in zip(cases(runs.seed), found, strict=True):
        yield f"assign_tensors({sizes}, {num_servers})", sizes, num_servers, of_ranks


@clause("parameter_server.sync", "C1", worlds=(1,), runs=[on_ranks(assign)])
def one_server_each(runs: Runs) -> str | None:
    """V: a number for each tensor; the same on every rank."""
    for call, sizes, num_servers, of_ranks in _assigned(runs):
        servers = of_ranks[0]
        if isinstance(servers, str):
            raise NotYetError(f"{call} {servers}")
        if len(servers) != len(sizes):
            raise NotYetError(
                f"{call} has {len(servers)} entries, and there are "
                f"{times(len(sizes), 'tensor')}",
                rule="the list has one server for each tensor, in the order of sizes",
            )
        unknown = [s for s in servers if not 0 <= s < num_servers]
        if unknown:
            raise NotYetError(
                f"{call} names server {unknown[0]}; they are 0 … {num_servers - 1}"
            )
        if any(other != servers for other in of_ranks):
            raise NotYetError(
                f"{call} differs between ranks",
                slug="assigned-per-rank",
                evidence=tuple(
                    Evidence(rank=r, state="", text=str(s))
                    for r, s in enumerate(of_ranks)
                ),
                rule="every rank must find a tensor on the same server",
            )
    return None


def loads_of(sizes: list[int], servers: list[int], num_servers: int) -> list[int]:
    """The bytes of each server."""
    return [
        sum(size for size, s in zip(sizes, servers, strict=True) if s == server)
        for server in range(num_servers)
    ]


def largest_first(sizes: list[int], num_servers: int) -> int:
    """The largest load when tensors are placed by size, each where there is least."""
    loads = [0] * num_servers
    for size in sorted(sizes, reverse=True):
        loads[loads.index(min(loads))] += size
    return max(loads)


@clause("parameter_server.sync", "C2", worlds=(1,), runs=[on_ranks(assign)])
def balanced_by_bytes(runs: Runs) -> str | None:
    """V: no tensor can move and make the largest load smaller, or it is small."""
    for call, sizes, num_servers, of_ranks in _assigned(runs):
        servers = of_ranks[0]
        if isinstance(servers, str) or len(servers) != len(sizes):
            raise NotJudgedError
        loads = loads_of(sizes, servers, num_servers)
        most = max(loads)
        least = min(
            (size for size, s in zip(sizes, servers, strict=True) if loads[s] == most),
            default=0,
        )
        if most <= min(loads) + least or most <= largest_first(sizes, num_servers):
            continue
        raise NotYetError(
            f"{call}: server {loads.index(most)} has {most} bytes, server "
            f"{loads.index(min(loads))} has {min(loads)}; a tensor "
            f"of {least} could move",
            slug=_balance_slug(runs),
            evidence=tuple(
                Evidence(
                    rank=NOBODY,
                    state=f"server {server}",
                    text=f"{load} bytes: "
                    + " ".join(
                        str(z)
                        for z, s in zip(sizes, servers, strict=True)
                        if s == server
                    ),
                )
                for server, load in enumerate(loads)
            ),
        )
    return None


def _balance_slug(runs: Runs) -> str:
    in_turn = all(
        of_ranks[0] == [index % num_servers for index in range(len(sizes))]
        for _, sizes, num_servers, of_ranks in _assigned(runs)
    )
    return "balanced-by-count" if in_turn else ""


# ── C3 ──────────────────────────────────────────────────────────────────────────────


def orders(seed: int) -> list[tuple[int, list[Move]]]:
    """Numbers of workers, each with an order of their messages in step."""
    draw = random.Random(seed)
    return [(n, drawn_order(draw, n, NUM_STEPS, 0)) for n in (3, 1, 2, 5)]


def trace(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """The weights after each push of each order; none of them pulls."""
    found = []
    for n, moves in orders(seed):
        server = unit.SyncServer(torch.tensor(WEIGHTS, dtype=torch.float64), n, LR)
        weights = []
        for rank, _, number in (move for move in moves if move[1] == PUSH):
            gradient = torch.tensor(gradient_of(rank, number), dtype=torch.float64)
            server.push(rank, number, gradient)
            weights.append(server.weights.tolist())
        found.append(weights)
    return found


def after(num_workers: int, num_steps: int, factor: float = 1.0) -> list[float]:
    """The right weights after so many steps."""
    return [
        start
        - LR
        * factor
        / num_workers
        * sum(
            gradient_of(rank, step + 1)[k]
            for step in range(num_steps)
            for rank in range(num_workers)
        )
        for k, start in enumerate(WEIGHTS)
    ]


@clause("parameter_server.sync", "C3", worlds=(1,), runs=[on_ranks(trace)])
def one_step_of_all(runs: Runs) -> str | None:
    """V: the weights after each push, in the order in which they arrive."""
    found = worked_out(runs, trace).values[0]
    for (n, moves), weights in zip(orders(runs.seed), found, strict=True):
        pushes = [move for move in moves if move[1] == PUSH]
        for place, values in enumerate(weights):
            done = (place + 1) // n
            if not close(values, after(n, done)):
                raise _wrong_weights(n, pushes[: place + 1], values)
    return "the same weights in whichever order the workers push"


def _wrong_weights(n: int, pushes: list[Move], values: Any) -> NotYetError:
    done, partly = divmod(len(pushes), n)
    lines = tuple(
        Evidence(rank=r, state=f"push {k}", text=shown(gradient_of(r, k)))
        for r, _, k in pushes[-6:]
    )
    expected = after(n, done)
    if partly:
        arrived = (
            f"only {times(partly, 'worker')} of {n} had pushed for step {done + 1}"
        )
        return NotYetError(
            f"{arrived}, and the weights are {shown(values)}: expected "
            f"{shown(expected)}, as before that step",
            slug="first-push-steps",
            evidence=lines,
            rule="the step is taken when the last of the n gradients has arrived",
        )
    slug, rule = "", ""
    if n > 1 and done == 1 and close(values, after(n, 1, factor=n)):
        slug, rule = "sum-not-mean", "the mean is the sum divided by n"
    what = "worker" if n == 1 else "workers"
    return NotYetError(
        f"{n} {what}, after step {done}: weights {shown(values)}, expected "
        f"{shown(expected)}",
        slug=slug,
        evidence=lines,
        rule=rule,
    )


# ── C4 ──────────────────────────────────────────────────────────────────────────────


class InStep:
    """What a right server replies."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers, self.clocks = num_workers, [0] * num_workers

    def offer(self, peer: int, request: list[Any]) -> Any:
        """See `Model`."""
        kind, number, _ = request
        if kind == PUSH:
            self.clocks[peer] = number
            return "ok"
        if min(self.clocks) < number:
            return None
        return after(self.num_workers, min(self.clocks))

    def gone(self, peer: int) -> None:
        """See `Model`."""

    def restart(self) -> None:
        """See `Model`."""


def answer(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """What a server replies to each order of messages."""

    def maker(n: int) -> Any:
        weights = torch.tensor(WEIGHTS, dtype=torch.float64)
        return lambda _: unit.SyncServer(weights, n, LR)

    return [
        played_by_hand(maker(n), map(ask, moves), CODEC) for n, moves in orders(seed)
    ]


def on_processes(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """Every rank is a worker; rank 0 has the server as well."""
    assert context.endpoint
    assert context.store
    endpoint, store, n = context.endpoint, context.store, context.world_size
    play = store.add(f"play{context.rank}", 1)  # it may be played more than once
    if context.rank == 0:
        weights = torch.tensor(WEIGHTS, dtype=torch.float64)
        endpoint.serve(unit.SyncServer(weights, n, LR).handle)
        store.set(f"serves{play}", b"")
    store.wait([f"serves{play}"])
    pulled = []
    for number in range(1, NUM_STEPS + 1):
        for kind in (PUSH, PULL):
            message = ask((context.rank, kind, number)).message
            pulled.append(CODEC.reply(endpoint.call(0, message, _TIMEOUT_S)))
    store.set(f"done{play} {context.rank}", b"")
    store.wait([f"done{play} {rank}" for rank in range(n)])
    return pulled[1::2]


def _orders_or_processes(world_size: int) -> list[RunSpec]:
    return [on_ranks(answer if world_size == 1 else on_processes)]


@clause("parameter_server.sync", "C4", worlds=(1, 3), runs=_orders_or_processes)
def answered_after_the_step(runs: Runs) -> str | None:
    """V: every reply, or "not yet", as it was due; then the same on processes."""
    if runs.world_size > 1:
        return _the_same_on_processes(runs)
    found = worked_out(runs, answer).values[0]
    for (n, _), history in zip(orders(runs.seed), found, strict=True):
        wrong = first_difference(history, InStep(n), lambda reply, expected: True)
        if wrong is None:
            continue
        _, number, _ = wrong.row.request
        pushed = {
            row[1] for row in history[: wrong.place] if row[2][:2] == [PUSH, number]
        }
        had = f"{times(len(pushed), 'worker')} of {n} had made push {number}"
        if wrong.row.request[0] == PUSH:
            message = f'a push was answered with {wrong.row.reply!r}, not with "ok"'
        elif wrong.expected is None:
            message = f"a pull after push {number} was answered, and {had}"
        else:
            message = f"a pull after push {number} was not answered, and {had}"
        slug = "pull-ahead" if wrong.expected is None else ""
        raise NotYetError(
            message, slug=slug, evidence=last_rows(history, words, wrong.place)
        )
    return None


def _the_same_on_processes(runs: Runs) -> str:
    run, n = runs.finished(on_processes), runs.world_size
    for rank, pulled in enumerate(run.values):
        for number, values in enumerate(pulled, 1):
            if not close(values, after(n, number)):
                raise NotYetError(
                    f"on {n} processes: rank {rank} pulled {shown(values)} after push "
                    f"{number}, expected {shown(after(n, number))}"
                )
    return "and on processes: three workers, one of them with the server"
