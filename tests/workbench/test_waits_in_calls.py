"""Ranks that wait in calls to services: for good, or not; and what is said of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
import torch

from distlab.comm import ServiceContext
from distlab.comm.services import Started, Tick, WakeAt
from distlab.runner import Cluster, Limits, RankContext
from distlab.runner.autopsy import evidence
from tests.workbench.golden import Golden
from tests.workbench.naming import named

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


def line_of(program: Callable[..., object]) -> int:
    """Where a program of three lines calls its service."""
    return program.__code__.co_firstlineno + 2


def test_all_wait_for_a_service(cluster: Cluster, golden: Golden) -> None:
    run = cluster.run(pull, 2, limits=LIMITS, services={"server": never})
    assert run.outcome == "deadlock"
    where = f"test_waits_in_calls.py:{line_of(pull)}"
    told = ('"server"', where)
    assert named(run.explanation, "rank 0", *told, "rank 1", *told), run.explanation
    for line in evidence(run):
        assert line.state == "waiting"
        assert named(line.text, '"server"')
        assert line.where.endswith(where)
    golden("autopsy/waits for a service", re.sub(r"\.py:\d+", ".py", run.explanation))


@pytest.mark.parametrize("backend", ["tcp", "gloo"])
def test_one_waits_in_a_call_and_one_in_recv(cluster: Cluster, backend: str) -> None:
    run = cluster.run(one_waits_for_the_other, 2, limits=LIMITS, backend=backend)
    assert run.outcome == "deadlock"
    assert run.waits_for == {0: (1,), 1: ()}
    assert run.ranks[1].waiting is not None
    assert run.ranks[1].waiting["service"] == "rank 0"
    assert named(run.explanation, "rank 1", "rank 0", "test_waits_in_calls.py")


def test_all_wait_for_the_store(cluster: Cluster) -> None:
    run = cluster.run(wait_for_nobody, 2, limits=LIMITS)
    assert run.outcome == "deadlock"
    where = f"test_waits_in_calls.py:{line_of(wait_for_nobody)}"
    assert named(run.explanation, "rank 0", '"store"', where)


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
