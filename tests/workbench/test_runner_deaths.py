"""Runs that outlive deaths: ranks and services killed, frozen and started again."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from distlab.processes.tree import descendants
from distlab.runner import Cluster, Limits, Run
from distlab.runner.zygote import num_threads
from tests.workbench.conformance import deaths, misbehaviour, own_processes
from tests.workbench.naming import named

LIMITS = Limits(seconds=60)

Start = Callable[..., Run]


@pytest.fixture
def start(cluster: Cluster) -> Start:
    """Run a program on TCP, and do to its processes what its reports ask for."""

    def obey(_rank: int, order: str) -> None:
        what, _, whom = order.partition(" ")
        getattr(cluster, what)(int(whom) if whom.isdigit() else whom)

    def run(program: Any, world_size: int, *args: Any, **how: Any) -> Run:
        how = {"limits": LIMITS, "backend": "tcp", "on_report": obey, **how}
        return cluster.run(program, world_size, *args, **how)

    return run


def statuses(run: Run) -> list[str]:
    return [record.status for record in run.ranks]


def assert_nobody_is_left(cluster: Cluster) -> None:
    cluster.settle()
    assert cluster._process is not None
    assert descendants(cluster._process.pid) == []


def test_a_declared_death_leaves_the_others_results_whole(
    cluster: Cluster, start: Start
) -> None:
    run = start(deaths.sums_before_and_after, 3, may_die=(1,))
    assert (run.outcome, statuses(run)) == (
        "finished",
        ["finished", "died", "finished"],
    )
    assert run.values == [[6.0, 2.0], None, [6.0, 0.0]]
    assert run.ranks[1].exit_status == 9
    assert named(run.explanation, 2, "rank 1", "SIGKILL")
    assert_nobody_is_left(cluster)


@pytest.mark.parametrize("backend", ["tcp", "gloo"])
def test_only_a_declared_death_is_outlived(start: Start, backend: str) -> None:
    run = start(deaths.dies_by_itself, 2, may_die=(1,), backend=backend)
    assert (run.outcome, run.values) == ("finished", ["lost", None])
    run = start(deaths.dies_by_itself, 2, backend=backend)
    assert run.outcome == "died"
    assert run.primary() is run.ranks[1]
    assert named(run.explanation, "rank 1", "SIGKILL")


def test_who_raises_has_not_died(start: Start) -> None:
    run = start(deaths.raises, 2, may_die=(1,))
    assert (run.outcome, statuses(run)[1]) == ("raised", "raised")


def test_a_deadlock_beside_a_declared_death_is_one(start: Start) -> None:
    run = start(deaths.deadlock_beside_a_death, 3, may_die=(1,))
    assert (run.outcome, run.waits_for) == ("deadlock", {0: (2,), 2: (0,)})


@pytest.mark.parametrize(
    ("whom", "why"),
    [
        ("0", r"rank 0\b.*\bmay_die"),
        ("7", r"rank 7\b.*\brank 0\b.*\brank 1\b"),
        ("ps", r"\bps\b.*\brank 0\b.*\brank 1\b"),
    ],
)
def test_nobody_else_is_killed(
    cluster: Cluster, start: Start, whom: str, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        start(deaths.kills, 2, whom, may_die=(1,))
    assert_nobody_is_left(cluster)
    with pytest.raises(ValueError, match=r"^kill\b"):
        cluster.kill(1)


def test_who_is_declared_must_be_there(start: Start) -> None:
    with pytest.raises(ValueError, match=r"\b2\b.*\b0\b.*\b1\b"):
        start(misbehaviour.hello, 2, may_die=(2,))


def test_a_second_life_has_the_files_and_the_address(
    cluster: Cluster, start: Start
) -> None:
    """Nobody is answered by the child that the first life left behind."""
    run = start(deaths.second_life, 2, may_die=(0,))
    (kept, rank, refused), told = run.require_finished().values
    assert (kept, rank, told) == ("first life", 0, ["second"])
    assert named(refused, "rank 0", "comm.barrier", "endpoint", "store")
    assert run.ranks[0].deaths == [9]
    assert_nobody_is_left(cluster)


def test_connections_are_made_again_under_the_guard(start: Start) -> None:
    run = start(
        deaths.under_guard,
        2,
        services={"ledger": own_processes.ledger},
        may_die=("ledger",),
    )
    for kept, *refused in run.require_finished().values:
        assert kept == "abd"
        for text, call in zip(refused, ("bind", "connect"), strict=True):
            assert named(text, "ForbiddenError", "comm", f"socket.{call}")
    assert run.services["ledger"].deaths == [9]


# ── services ────────────────────────────────────────────────────────────────────────


def test_a_service_that_dies_ends_the_run_unless_it_may(
    cluster: Cluster, start: Start
) -> None:
    ask, ps = deaths.asks_the_service, {"ps": deaths.mortal}
    run = start(ask, 2, "ps", services=ps)
    assert run.outcome == "died"
    assert named(run.explanation, '"ps"', "SIGKILL")
    run = start(ask, 2, "ps", services=ps, may_die=("ps",))
    assert (run.outcome, statuses(run)) == ("raised", ["raised"] * 2)
    assert "PeerLost" in run.explanation
    assert_nobody_is_left(cluster)


def test_a_service_that_cannot_be_made_says_why(start: Start) -> None:
    ps = {"ps": (deaths.cannot_be_made, "no shards")}
    run = start(deaths.asks_the_service, 1, "ps", services=ps)
    assert run.outcome == "raised"
    assert named(run.explanation, '"ps"', "ValueError", "no shards")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"store": deaths.mortal}, "'store'"),
        ({"rank 0": deaths.mortal}, "'rank 0'"),
        ({"": deaths.mortal}, "''"),
        ({"ps": lambda ctx: None}, "<lambda>"),
        ({f"s{k}": deaths.mortal for k in range(17)}, r"\b17\b.*\b16\b"),
    ],
)
def test_services_that_cannot_be(start: Start, given: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        start(misbehaviour.hello, 1, services=given)


def test_more_than_a_mebibyte_is_for_who_asks(start: Start) -> None:
    run = start(deaths.large, 2)
    assert named(run.explanation, 3 << 20, 1 << 20)
    run = start(deaths.large, 2, max_frame_bytes=4 << 20)
    assert run.require_finished().values == [3 << 20] * 2


def test_runs_leave_no_thread_and_no_descriptor(start: Start) -> None:
    start(misbehaviour.hello, 2)
    threads, before = num_threads(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        start(deaths.second_life, 2, may_die=(0,))
    assert num_threads() == threads
    assert len(os.listdir("/proc/self/fd")) == before
