"""Recorded once, replayed under stragglers: the same times as simulating each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from distlab.comm import ANY
from distlab.runner import RankContext
from distlab.sim import AlphaBeta, run
from distlab.sim.faults import Faults
from distlab.sim.net.fabric import Fabric
from distlab.sim.net.links import Network
from distlab.sim.net.loggp import LogGP
from distlab.sim.plans.pipelines import TimedStage, one_f_one_b
from distlab.sim.plans.replay import record
from distlab.sim.plans.schedules import (
    hierarchical_all_reduce,
    rabenseifner_all_reduce,
    ring_all_reduce,
    tree_all_reduce,
)
from tests.workbench.golden import Golden
from tests.workbench.refusals import refusal

NET = AlphaBeta(alpha_s=3e-6, bytes_per_s=2e9)
N = 8
Program = Callable[..., Any]


def data(count: int = 240) -> torch.Tensor:
    return torch.ones(count, dtype=torch.float64)


def ring(ctx: RankContext) -> None:
    """Three training steps: compute, average, compute a little more."""
    for step in range(3):
        ctx.clock.sleep(1e-5 * (step + 1))
        ring_all_reduce(ctx.comm, data())
    ctx.clock.sleep(2e-6)


def halving(ctx: RankContext) -> None:
    ctx.clock.sleep(1e-5)
    rabenseifner_all_reduce(ctx.comm, data())


def tree(ctx: RankContext) -> None:
    ctx.clock.sleep(1e-5 * (ctx.rank + 1))
    tree_all_reduce(ctx.comm, data())


def nodes(ctx: RankContext) -> None:
    ctx.clock.sleep(1e-5)
    hierarchical_all_reduce(ctx.comm, data(), 4)


def overlapping(ctx: RankContext) -> None:
    """Sends and receives that go on while the rank computes."""
    left, right = (ctx.rank - 1) % N, (ctx.rank + 1) % N
    box = data()
    for tag in range(3):
        works = [ctx.comm.irecv(box, left, tag), ctx.comm.isend(data(), right, tag)]
        ctx.clock.sleep(4e-6)
        for work in works:
            work.wait()
    ctx.comm.isend(data(), right, tag=99)  # nobody receives it


def pipeline(ctx: RankContext) -> None:
    like = torch.zeros(10)
    stage = TimedStage(
        forward_s=1e-3, backward_s=2e-3, like=like, sleep=ctx.clock.sleep
    )
    one_f_one_b(ctx.comm, stage, [like] * 5)


def scenarios(count: int, n: int = N) -> np.ndarray[Any, np.dtype[np.float64]]:
    """One or two stragglers each, up to five times as slow; the first has none."""
    random = np.random.default_rng(3)
    chosen = random.random((count, n)) < 1.5 / n
    factors = np.where(chosen, 1 + 4 * random.random((count, n)), 1.0)
    factors[0] = 1.0
    return factors


def simulated_s(program: Program, factors: Any, net: Network) -> float:
    slow = {rank: float(f) for rank, f in enumerate(factors) if f != 1.0}
    done = run(program, N, net=net, faults=Faults(straggler=slow), journal=False)
    done.require_finished()
    return done.time_s


# Activations and gradients come into a stage at the same time now and then; on this net
# they do not get into each other's way.
WIDE = AlphaBeta(alpha_s=3e-6, bytes_per_s=math.inf)
CASES: list[tuple[Program, Network]] = [
    *((program, NET) for program in (ring, halving, tree, nodes, overlapping)),
    *((program, LogGP()) for program in (ring, halving, tree)),
    (pipeline, WIDE),
]


@pytest.mark.parametrize(("program", "net"), CASES)
def test_a_replay_says_what_a_simulation_says(program: Program, net: Network) -> None:
    factors = scenarios(20)
    replayed = record(program, N, net=net).replay(factors)
    simulated = [simulated_s(program, row, net) for row in factors]
    assert replayed.tolist() == pytest.approx(simulated, rel=1e-9)
    assert len(set(simulated)) > 10


def test_many_scenarios_are_worked_out_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recording = record(ring, N, net=NET)
    factors = scenarios(30)
    at_once = recording.replay(factors)
    monkeypatch.setattr("distlab.sim.plans.replay._MOST", 7 * len(recording.messages))
    assert recording.replay(factors).tolist() == at_once.tolist()
    assert recording.replay(np.ones((0, N))).tolist() == []
    assert recording.replay(factors[3]).tolist() == [at_once[3]]


def test_a_slip_in_the_replay_would_show() -> None:
    recording = record(tree, N, net=NET)
    factors = scenarios(20)
    moved = np.roll(factors, 1, axis=1)  # every straggler one rank further
    assert recording.replay(moved).tolist() != recording.replay(factors).tolist()


# ── what is refused ─────────────────────────────────────────────────────────────────


def incast(ctx: RankContext) -> None:
    """All push to rank 0 at once: its way in is shared."""
    if ctx.rank:
        ctx.comm.send(data(), 0)
        return
    works = [ctx.comm.irecv(data(), src) for src in range(1, N)]
    for work in works:
        work.wait()


def incast_if_slow(ctx: RankContext) -> None:
    """The same, one a microsecond after the other: they meet only if one is late."""
    if ctx.rank:
        ctx.clock.sleep(1e-6 * ctx.rank)
        ctx.comm.send(data(), 0)
        return
    works = [ctx.comm.irecv(data(), src) for src in range(1, N)]
    for work in works:
        work.wait()


def from_anyone(ctx: RankContext) -> None:
    if ctx.rank:
        ctx.comm.send(data(), 0)
        return
    for _ in range(1, N):
        ctx.comm.recv(data(), ANY)


def collective(ctx: RankContext) -> None:
    ctx.comm.barrier()


def hanging(ctx: RankContext) -> None:
    if ctx.rank == 0:
        ctx.comm.recv(data(), 1)


def failing(ctx: RankContext) -> None:
    raise ValueError("the program's own fault")


REFUSED: list[tuple[Program, Network, str]] = [
    (incast, NET, r"into rank 0\b"),
    (from_anyone, NET, r"\brecv\b"),
    (collective, NET, r"\bbarrier\b"),
    (hanging, NET, r"\brank 1\b"),
    (failing, NET, r"\bown fault\b"),
    (ring, Fabric(), r"\blinks\b"),
]


def test_what_cannot_be_recorded(golden: Golden) -> None:
    told = []
    for program, net, named in REFUSED:
        told.append(refusal(ValueError, record, program, N, net=net))
        assert re.search(named, told[-1])
    text = re.sub(r"\.py:\d+", ".py:<line>", "\n".join(told))
    golden("sim/runs-that-cannot-be-replayed", text)


def test_messages_that_would_meet_in_one_scenario_are_noticed() -> None:
    recording = record(incast_if_slow, N, net=NET)
    factors = np.ones((5, N))
    recording.replay(factors)
    factors[3, 2] = 1.5
    with pytest.raises(ValueError, match=r"\brank 0\b"):
        recording.replay(factors)


@pytest.mark.parametrize(
    ("factors", "named"),
    [
        (np.ones((2, N - 1)), rf"\(2, {N - 1}\).*\b{N} ranks"),
        (np.ones((2, 2, N)), rf"\(2, 2, {N}\).*\b{N} ranks"),
        (np.zeros((1, N)), r"factor\b.*\babove 0\b"),
        (np.full((1, N), np.nan), r"factor\b.*\babove 0\b"),
        (np.full((1, N), np.inf), r"factor\b.*\babove 0\b"),
    ],
)
def test_factors_that_cannot_be(factors: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        record(ring, N, net=NET).replay(factors)
