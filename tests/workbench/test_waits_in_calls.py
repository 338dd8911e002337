"""Ranks that wait in calls to services: for good, or not; and what is said of it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from distlab.comm import ServiceContext
from distlab.comm.services import Started, Tick, WakeAt
from distlab.runner import Cluster, Limits, RankContext
from distlab.runner.autopsy import evidence

LIMITS = Limits(seconds=30)
FOREVER = float("inf")


class Never:
    """Has no answer."""

    def handle(self, peer: int, message: bytes) -> None:
        return None


class Barrier:
    """Answers the k-th message of each rank when all have sent theirs."""

    def __init__(self, world_size: int) -> None:
        self.rounds = [0] * world_size

    def handle(self, peer: int, message: bytes) -> bytes | None:
        self.rounds[peer] = max(self.rounds[peer], int(message))
        return b"go" if min(self.rounds) >= int(message) else None


class Later(Never):
    """Answers by itself, after half a second."""

    def __init__(self) -> None:
        self.is_over = False

    def handle(self, peer: int, message: bytes) -> bytes | None:  # type: ignore[override]
        return b"now" if self.is_over else None

    def on(self, event: object, now_s: float) -> Sequence[object]:
        if isinstance(event, Started):
            return [WakeAt(now_s + 0.5)]
        self.is_over |= isinstance(event, Tick)
        return []


def never(context: ServiceContext) -> Never:
    return Never()


def barrier(context: ServiceContext) -> Barrier:
    return Barrier(3)


def later(context: ServiceContext) -> Later:
    return Later()


def pull(ctx: RankContext, timeout_s: float = FOREVER) -> str:
    assert ctx.endpoint
    return ctx.endpoint.call("server", b"pull", timeout_s).decode()


def one_waits_for_the_other(ctx: RankContext) -> None:
    assert ctx.endpoint
    assert ctx.store
    if ctx.rank == 0:
        ctx.endpoint.serve(Never().handle)
        ctx.store.set("serves", b"")
        ctx.comm.recv(torch.zeros(1), 1)
    else:
        ctx.store.wait(["serves"])
        ctx.endpoint.call(0, b"pull", FOREVER)


def meet_often(ctx: RankContext) -> int:
    assert ctx.endpoint
    for number in range(1, 201):
        if number % 50 == ctx.rank:
            ctx.clock.sleep(0.3)  # the others wait, longer than two looks are apart
        ctx.endpoint.call("server", b"%d" % number, FOREVER)
    return number


def wait_for_nobody(ctx: RankContext) -> None:
    assert ctx.store
    ctx.store.wait(["never set"])


def test_all_wait_for_a_service(cluster: Cluster) -> None:
    run = cluster.run(pull, 2, limits=LIMITS, services={"server": never})
    assert run.outcome == "deadlock"
    waits = r'waits in call to the service "server" at test_waits_in_calls.py:\d+'
    not_yet = 'which has answered "not yet"'
    expected = rf"rank 0 {waits}, {not_yet}; rank 1 {waits}, {not_yet}, and no rank "
    assert re.match(expected, run.explanation), run.explanation
    for line in evidence(run):
        assert line.state == "waiting"
        assert line.text == 'call to the service "server": not yet'
        assert "test_waits_in_calls.py:" in line.where


@pytest.mark.parametrize("backend", ["tcp", "gloo"])
def test_one_waits_in_a_call_and_one_in_recv(cluster: Cluster, backend: str) -> None:
    run = cluster.run(one_waits_for_the_other, 2, limits=LIMITS, backend=backend)
    assert run.outcome == "deadlock"
    assert run.waits_for == {0: (1,), 1: ()}
    assert run.explanation.startswith("rank 1 waits in call to rank 0 at ")


def test_all_wait_for_the_store(cluster: Cluster) -> None:
    run = cluster.run(wait_for_nobody, 2, limits=LIMITS)
    assert run.outcome == "deadlock"
    assert 'rank 0 waits in call to the service "store" at ' in run.explanation


def test_a_service_that_knows_the_time_may_answer_by_itself(cluster: Cluster) -> None:
    run = cluster.run(pull, 2, limits=LIMITS, services={"server": later})
    assert run.require_finished().values == ["now", "now"]


def test_who_is_answered_again_and_again_is_not_stuck(cluster: Cluster) -> None:
    run = cluster.run(meet_often, 3, limits=LIMITS, services={"server": barrier})
    assert run.require_finished().values == [200] * 3


def test_a_call_that_gives_up_is_no_deadlock(cluster: Cluster) -> None:
    run = cluster.run(pull, 2, 0.5, limits=LIMITS, services={"server": never})
    assert run.outcome == "raised"
    assert "PeerLost" in run.explanation
