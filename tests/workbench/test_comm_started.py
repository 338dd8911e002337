"""Collectives with async_op: the same contract on every transport."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from distlab.runner import Cluster
from distlab.sim import AlphaBeta, run
from tests.workbench.conformance import started
from tests.workbench.golden import Golden
from tests.workbench.naming import named
from tests.workbench.test_comm_conformance import HERE, PROCESSES, Transport

ON_PROCESSES = [transport for transport in PROCESSES if transport.name != "nccl"]
OPS = sorted(started.STARTS)


@pytest.fixture(params=HERE, ids=lambda transport: transport.name)
def transport(request: pytest.FixtureRequest) -> Transport:
    chosen: Transport = request.param
    return chosen


def values(cluster: Cluster, transport: Transport, *what: Any) -> list[Any]:
    return transport.run(cluster, *what).require_finished().values


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_four_kinds_in_flight_at_once(
    cluster: Cluster, transport: Transport, n: int
) -> None:
    total = n * (n + 1) / 2
    for rank, got in enumerate(
        values(cluster, transport, started.all_kinds_at_once, n)
    ):
        mine = [float(3 * rank + i) for i in range(3)]
        assert got["gathered"] == [1.0 + r for r in range(n) for _ in range(2)]
        assert got["summed"] == [total * x for x in mine]
        assert got["averaged"] == pytest.approx([total * x / n for x in mine])
        assert got["exchanged"] == [10.0 * r + rank for r in range(n) for _ in "ab"]


@pytest.mark.parametrize("n", [1, 3])
def test_another_collective_may_come_before_the_wait(
    cluster: Cluster, transport: Transport, n: int
) -> None:
    got = values(cluster, transport, started.between_a_start_and_its_wait, n)
    assert got == [[float(n), *(5.0 + r for r in range(n))]] * n


def test_a_blocking_call_returns_nothing(
    cluster: Cluster, transport: Transport
) -> None:
    got = values(cluster, transport, started.blocking_gives_nothing, 2)
    assert got == [[True] * len(OPS)] * 2


@pytest.mark.parametrize("n", [1, 3])
def test_mistakes_are_refused_before_anything_is_sent(
    cluster: Cluster, transport: Transport, n: int, golden: Golden
) -> None:
    for texts in values(cluster, transport, started.refused_when_started, n):
        for op in started.LIMITED:
            assert named(texts[op], op, "async_op", "timeout_s=1", "wait()")
        assert named(texts["size"], 2 * n, 2 * n + 1)
        assert named(texts["average"], "torch.int64")
        assert texts["afterwards"] == str(n)
        if n == 3:
            told = [texts[name] for name in (*started.LIMITED, "size", "average")]
            golden("comm/refusals of started calls", "\n".join(told))


@pytest.mark.parametrize("op", OPS)
def test_a_wait_that_runs_out_is_a_lost_peer(
    cluster: Cluster, transport: Transport, op: str
) -> None:
    if transport.name == "nccl":
        pytest.skip("NCCL does not bound the first contact of two ranks")
    if (transport.name, op) == ("gloo", "reduce_scatter"):
        pytest.skip("the wait() of torch's own reduce_scatter on gloo ignores a limit")
    told = values(cluster, transport, started.nobody_else_comes, 2, op)[0]
    assert (told["rank"], told["peer"], told["step"]) == (0, None, 1)
    assert 0.14 <= told["waited_s"] < 10


@pytest.mark.parametrize("op", OPS)
def test_a_hang_in_the_wait_is_named(
    cluster: Cluster, transport: Transport, op: str
) -> None:
    if transport.name == "nccl":
        pytest.skip("NCCL connects two ranks when the call is made")
    done = transport.run(cluster, started.one_never_comes, 3, op)
    assert done.outcome == "deadlock"
    assert [record.status for record in done.ranks] == [
        "waiting",
        "waiting",
        "finished",
    ]
    assert done.waits_for[0] == done.waits_for[1] == (2,)
    assert named(done.explanation, "rank 0", op, "rank 2")
    source, first = inspect.getsourcelines(started.one_never_comes)
    wait = first + next(i for i, text in enumerate(source) if "work.wait()" in text)
    for record in done.ranks[:2]:
        assert record.waiting is not None
        assert (record.waiting["op"], record.journal[-1]["k"]) == (op, "wait")
        assert record.journal[-1]["line"] == wait


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("transport", ON_PROCESSES, ids=lambda one: one.name)
def test_it_goes_on_while_a_rank_computes(
    cluster: Cluster, transport: Transport, tmp_path: Path, op: str
) -> None:
    program = started.goes_on_while_rank_zero_computes
    assert values(cluster, transport, program, 3, op, str(tmp_path)) == [True] * 3


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("transport", ON_PROCESSES, ids=lambda one: one.name)
def test_a_peer_that_dies_is_told_by_the_wait(
    cluster: Cluster, transport: Transport, op: str
) -> None:
    told: dict[int, Any] = {}
    done = transport.run(
        cluster, started.a_peer_is_gone, 2, op, on_report=told.__setitem__
    )
    assert done.outcome == "died"
    assert (told[0]["rank"], told[0]["peer"]) == (0, None)


@pytest.mark.parametrize("op", OPS)
def test_computation_hides_it_in_virtual_time(op: str) -> None:
    net = AlphaBeta(alpha_s=3e-6, bytes_per_s=2e9)
    (transfer_s, *_) = run(started.alone, 4, op, net=net).require_finished().values
    assert transfer_s > 0
    for compute_s in (transfer_s / 3, 3 * transfer_s):
        done = run(started.in_virtual_time, 4, op, compute_s, net=net)
        for start_s, all_s in done.require_finished().values:
            assert start_s == 0
            assert all_s == pytest.approx(max(compute_s, transfer_s), rel=1e-6)
