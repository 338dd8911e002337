"""The simulated cluster: virtual time, what ranks keep apart, and how a run ends."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from distlab.comm import ANY, PeerLost
from distlab.runner import Limits, RankContext, RunnerError
from distlab.sim import AlphaBeta, SimRun, carriers, run
from tests.workbench.golden import Golden
from tests.workbench.refusals import refusal

NET = AlphaBeta(alpha_s=3e-6, bytes_per_s=2e9)
ALPHA_S, BYTES_PER_S = NET.alpha_s, NET.bytes_per_s


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64)


def neighbors(ctx: RankContext) -> tuple[int, int]:
    return (ctx.rank - 1) % ctx.world_size, (ctx.rank + 1) % ctx.world_size


def close_to(seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-9)


# ── virtual time ────────────────────────────────────────────────────────────────────


def ring_all_reduce(ctx: RankContext, size: int) -> float:
    """Reduce-scatter, then all-gather: 2 (n - 1) steps of one chunk each."""
    n, (left, right) = ctx.world_size, neighbors(ctx)
    chunks = list((zeros(size) + ctx.rank + 1).chunk(n))
    box = torch.empty_like(chunks[0])
    for step in range(2 * (n - 1)):
        out, into = (ctx.rank - step) % n, (ctx.rank - step - 1) % n
        ctx.comm.sendrecv(chunks[out], right, box, left)
        chunks[into] = box.clone() if step >= n - 1 else chunks[into] + box
    return float(torch.cat(chunks).sum())


def naive_broadcast(ctx: RankContext, size: int) -> None:
    if ctx.rank == 0:
        for dst in range(1, ctx.world_size):
            ctx.comm.send(zeros(size), dst)
    else:
        ctx.comm.recv(zeros(size), 0)


def all_push_to_zero(ctx: RankContext, size: int) -> None:
    """A parameter server: the way in of rank 0 takes one byte after the other."""
    if ctx.rank == 0:
        boxes = [zeros(size) for _ in range(1, ctx.world_size)]
        works = [ctx.comm.irecv(box, src + 1) for src, box in enumerate(boxes)]
        for work in works:
            work.wait()
    else:
        ctx.comm.send(zeros(size), 0)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 64])
def test_a_ring_all_reduce_takes_what_its_formula_says(n: int) -> None:
    size = 40 * n
    done = run(ring_all_reduce, n, size, net=NET)
    done.require_finished()
    num_bytes = 8 * size
    expected_s = 2 * (n - 1) * (ALPHA_S + num_bytes / (n * BYTES_PER_S))
    assert done.time_s == close_to(expected_s)
    assert done.values == [size * n * (n + 1) / 2] * n
    assert len(done.trace) == 2 * n * (n - 1)
    assert [record.messages for record in done.ranks] == [2 * (n - 1)] * n


@pytest.mark.parametrize("n", [2, 3, 8, 100])
def test_a_naive_broadcast_sends_one_after_the_other(n: int) -> None:
    done = run(naive_broadcast, n, 1000, net=NET)
    one_s = ALPHA_S + 8000 / BYTES_PER_S
    assert done.time_s == close_to((n - 1) * one_s)
    ends = [message.end_ps * 1e-12 for message in done.trace]
    assert ends == [close_to(one_s * k) for k in range(1, n)]


@pytest.mark.parametrize("n", [2, 3, 8])
def test_a_ranks_way_in_is_shared(n: int) -> None:
    done = run(all_push_to_zero, n, 1000, net=NET)
    assert done.time_s == close_to(ALPHA_S + (n - 1) * 8000 / BYTES_PER_S)


COLLECTIVES = {
    "all_reduce": lambda n, s_s: 2 * (n - 1) * ALPHA_S + 2 * (n - 1) / n * s_s,
    "broadcast": lambda n, s_s: math.ceil(math.log2(n)) * (ALPHA_S + s_s),
    "barrier": lambda n, s_s: math.ceil(math.log2(n)) * ALPHA_S,
}


def one_collective(ctx: RankContext, op: str) -> None:
    args = {"broadcast": (zeros(600), 0), "all_reduce": (zeros(600),)}.get(op, ())
    getattr(ctx.comm, op)(*args)


@pytest.mark.parametrize("op", COLLECTIVES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_a_library_collective_takes_what_its_formula_says(n: int, op: str) -> None:
    done = run(one_collective, n, op, net=NET)
    expected_s = COLLECTIVES[op](n, 4800 / BYTES_PER_S)
    assert done.time_s == pytest.approx(expected_s, rel=1e-6, abs=1e-15)


def busy(ctx: RankContext) -> list[Any]:
    """A bit of everything, in an order that only the kernel decides."""
    left, right = neighbors(ctx)
    ctx.comm.sendrecv(zeros(9), right, zeros(9), left)
    works = [ctx.comm.isend(zeros(ctx.rank + 1), right, tag=1)]
    works.append(ctx.comm.irecv(zeros(left + 1), left, tag=1))
    ctx.comm.barrier()
    for work in works:
        work.wait()
    if ctx.rank:
        ctx.comm.send(torch.rand(2), 0, tag=9)
        return []
    boxes = [torch.zeros(2) for _ in range(ctx.world_size - 1)]
    return [(ctx.comm.recv(box, ANY, tag=9), box.tolist()) for box in boxes]


def test_a_run_is_the_same_twice() -> None:
    first, second = (run(busy, 9, net=NET, seed=4) for _ in range(2))
    assert len(first.trace) == 9 + 9 + 8
    assert first.trace == second.trace
    assert (first.values, first.time_s) == (second.values, second.time_s)
    assert _journals(first) == _journals(second)
    assert run(busy, 9, net=NET, seed=5).values != first.values


def _journals(done: SimRun) -> list[Any]:
    """All but where in memory a tensor lies."""
    return [[{**event, "ptr": 0} for event in record.journal] for record in done.ranks]


def clock(ctx: RankContext) -> list[float]:
    before = ctx.comm.time()
    ctx.comm.barrier()
    return [before, ctx.comm.time()]


def test_a_ranks_clock_is_the_virtual_one() -> None:
    assert run(clock, 2, net=NET).values == [[0.0, ALPHA_S]] * 2


# ── hangs ───────────────────────────────────────────────────────────────────────────


def ring_of_sends(ctx: RankContext) -> None:
    left, right = neighbors(ctx)
    ctx.comm.send(zeros(1), right)  # THE LINE OF THE SEND
    ctx.comm.recv(zeros(1), left)


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize("n", [3, 1024])
def test_a_ring_of_sends_is_a_cycle(n: int, journal: bool) -> None:
    done = run(ring_of_sends, n, net=NET, journal=journal)
    assert (done.outcome, done.cycle) == ("deadlock", tuple(range(n)))
    assert done.waits_for == {rank: ((rank + 1) % n,) for rank in range(n)}
    assert {record.status for record in done.ranks} == {"waiting"}
    assert {r.waiting["op"] for r in done.ranks if r.waiting} == {"send"}
    with open(__file__) as file:
        line = [i for i, s in enumerate(file, 1) if "THE LINE OF THE SEND" in s]
    where = {(r.waiting["file"], r.waiting["line"]) for r in done.ranks if r.waiting}
    assert where == {(__file__, line[0])}


def any_of_a_finished(ctx: RankContext) -> None:
    if ctx.rank == 0:
        ctx.comm.recv(zeros(1), ANY)


def test_waiting_for_anyone_is_waiting_for_all_others() -> None:
    done = run(any_of_a_finished, 4)
    assert (done.outcome, done.waits_for) == ("deadlock", {0: (1, 2, 3)})


def test_a_deadlock_needs_no_time() -> None:
    assert run(ring_of_sends, 3).time_s == 0.0


# ── time limits ─────────────────────────────────────────────────────────────────────


def gives_up(ctx: RankContext, seconds: float) -> Any:
    if ctx.rank == 0:
        try:
            ctx.comm.recv(zeros(1), 1, timeout_s=seconds)
        except PeerLost as error:
            return error.waited_s, error.peer, error.step, ctx.comm.time()
    return None


@pytest.mark.parametrize("seconds", [0.25, 3600.0])
def test_a_time_limit_is_virtual(seconds: float) -> None:
    done = run(gives_up, 2, seconds)
    assert done.values[0] == (seconds, 1, 1, seconds)
    assert done.time_s == seconds


def test_a_limit_beyond_the_runs_own_is_none() -> None:
    assert run(gives_up, 2, 60.0, limits=Limits(seconds=10)).outcome == "deadlock"


def in_time(ctx: RankContext) -> float:
    if ctx.rank == 0:
        ctx.comm.recv(zeros(1), 1, timeout_s=5.0)
    else:
        ctx.comm.send(zeros(1), 0)
    return ctx.comm.time()


def test_a_limit_that_was_not_needed_costs_nothing() -> None:
    assert run(in_time, 2, net=NET).time_s < 1e-5


# ── what is refused ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [0, -1, 4097])
def test_how_many_ranks_there_can_be(n: int) -> None:
    with pytest.raises(ValueError, match=rf"(^|\s){n}\b.*\b4096\b"):
        run(clock, n)


def test_4096_ranks() -> None:
    done = run(naive_broadcast, 4096, 1, net=NET, journal=False)
    assert done.time_s == close_to(4095 * (ALPHA_S + 8 / BYTES_PER_S))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha_s", -1.0),
        ("alpha_s", math.inf),
        ("bytes_per_s", 0.0),
        ("bytes_per_s", math.nan),
    ],
)
def test_networks_that_cannot_be(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}\b.*{value}"):
        AlphaBeta(**{name: value})


def test_a_missing_greenlet_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carriers, "greenlet", None)
    with pytest.raises(RunnerError, match=r"\bgreenlet\b"):
        run(clock, 2)


def test_how_refusals_are_worded(
    golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [
        refusal(ValueError, run, clock, 4097),
        refusal(ValueError, AlphaBeta, alpha_s=-1.0),
        refusal(ValueError, AlphaBeta, bytes_per_s=0.0),
        refusal(ValueError, run, clock, 2, carrier="fibers"),
        refusal(ValueError, run, clock, 2, eager_bytes=-1),
        refusal(ValueError, run, clock, 2, wall_limit_s=0.0),
        refusal(ValueError, run, clock, 2, payload="bytes"),
    ]
    monkeypatch.setattr(carriers, "greenlet", None)
    golden("sim/refused-runs", "\n".join([*told, refusal(RunnerError, run, clock, 2)]))
