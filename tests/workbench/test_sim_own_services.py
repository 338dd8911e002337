"""Services that are no ranks: nodes of their own in a simulated run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from distlab.comm import PeerLost, ServiceContext
from distlab.comm.services import PeerGone, Started, Tick, WakeAt
from distlab.runner import RankContext
from distlab.sim import AlphaBeta, Faults, run
from tests.workbench.golden import Golden

NET = AlphaBeta(alpha_s=1e-3, bytes_per_s=1e9)


class Barrier:
    """Lets through as many as there are ranks; `late` too, when time is up."""

    def __init__(self, n: int, context: ServiceContext) -> None:
        self.n, self.clock = n, context.clock
        self.here: set[int] = set()
        self.is_over = False
        self.events: list[str] = []

    def handle(self, peer: int, message: bytes) -> bytes | None:
        if message == b"events":
            return " ".join(self.events).encode()
        self.here.add(peer)
        return b"go" if len(self.here) == self.n or self.is_over else None

    def on(self, event: object, now_s: float) -> Sequence[object]:
        self.events.append(f"{type(event).__name__}@{now_s:.2f}")
        if isinstance(event, Tick):
            self.is_over = True
        return [WakeAt(0.5)] if isinstance(event, Started) else []


def of_three(context: ServiceContext) -> Barrier:
    return Barrier(3, context)


def comes(ctx: RankContext, missing: bool) -> Any:
    assert ctx.endpoint
    if missing and ctx.rank == 2:
        return None
    ctx.clock.sleep(0.1 * ctx.rank)
    return ctx.endpoint.call("barrier", b"come", 9.0), ctx.clock.now_s()


def test_a_service_answers_when_it_can() -> None:
    services = {"barrier": of_three}
    done = run(comes, 3, False, net=NET, services=services)
    assert [reply for reply, _ in done.values] == [b"go"] * 3
    assert [at_s for _, at_s in done.values] == [pytest.approx(0.202)] * 3
    assert {(src, dst) for src, dst, *_ in done.service_messages} == {
        *((rank, "barrier") for rank in range(3)),
        *(("barrier", rank) for rank in range(3)),
    }
    assert list(done.trace) == []
    again = run(comes, 3, False, net=NET, services=services)
    assert again.trace_hash == done.trace_hash


def test_a_service_can_ask_to_be_woken() -> None:
    done = run(comes, 3, True, net=NET, services={"barrier": of_three})
    assert done.values[0] == (b"go", pytest.approx(0.501))


def test_a_service_is_told_who_is_gone() -> None:
    done = run(dies_beside, 3, net=NET, services={"barrier": of_three})
    assert done.values[0] == b"Started@0.00 PeerGone@0.00 PeerGone@0.20 Tick@0.50"
    assert PeerGone(1) != PeerGone(2)


def dies_beside(ctx: RankContext) -> Any:
    assert ctx.endpoint
    ctx.clock.sleep((1.0, 0.0, 0.2)[ctx.rank])
    return ctx.endpoint.call("barrier", b"events", 9.0) if ctx.rank == 0 else None


class Broken:
    """Fails where it is told to."""

    def __init__(self, where: str, action: object = None) -> None:
        if where == "start":
            raise OSError("no log")
        self.where, self.action = where, action

    def handle(self, peer: int, message: bytes) -> bytes | None:
        raise KeyError("momentum")

    def on(self, event: object, now_s: float) -> Sequence[object]:
        return [self.action] if self.where == "action" else []


@pytest.mark.parametrize(
    ("where", "kind", "reply", "error"),
    [
        ("handle", "RuntimeError", '"ps".*KeyError.*momentum', ""),
        ("start", "PeerLost", '"ps".*#1', '"ps".*OSError: no log'),
        ("action", "PeerLost", '"ps".*#1', r'"ps".*Started\(\).*TypeError.*\'soon\''),
    ],
)
def test_a_service_that_fails(where: str, kind: str, reply: str, error: str) -> None:
    done = run(asks_ps, 1, net=NET, services={"ps": lambda _: Broken(where, "soon")})
    ((found, message),) = done.values
    assert found == kind
    assert re.search(reply, message)
    assert set(done.service_errors) == ({"ps"} if error else set())
    for text in done.service_errors.values():
        assert re.search(error, text)
        assert done.explanation.endswith(text)


def asks_ps(ctx: RankContext) -> tuple[str, str]:
    assert ctx.endpoint
    try:
        return "", ctx.endpoint.call("ps", b"?", 1.0).decode()
    except (PeerLost, RuntimeError) as error:
        return type(error).__name__, str(error)


def test_how_failures_of_services_are_worded(golden: Golden) -> None:
    told = []
    for where in ("handle", "start", "action"):
        service = partial(Broken, where)
        done = run(
            asks_ps, 1, net=NET, services={"ps": lambda _, make=service: make("soon")}
        )
        told += [": ".join(done.values[0]), done.explanation]
    golden("sim/services-that-fail", "\n".join(told))


class Ticks:
    """Never stops."""

    def handle(self, peer: int, message: bytes) -> bytes | None:
        return None

    def on(self, event: object, now_s: float) -> Sequence[object]:
        return [WakeAt(now_s)]


def test_a_service_that_ticks_forever_hides_no_deadlock() -> None:
    done = run(waits_for_ps, 1, services={"ps": lambda context: Ticks()})
    assert done.outcome == "deadlock"
    waiting = done.ranks[0].waiting
    assert waiting is not None
    assert "ps" in waiting["op"]


def waits_for_ps(ctx: RankContext) -> None:
    assert ctx.endpoint
    ctx.endpoint.call("ps", b"?", float("inf"))


def test_what_is_refused() -> None:
    done = run(waits_for_ps, 2)
    assert done.outcome == "raised"
    assert re.search(r'"ps".*\b0 … 1\b', done.explanation)
    with pytest.raises(ValueError, match="'store'"):
        run(waits_for_ps, 1, services={"store": of_three})
    faults = Faults(freeze=(("ps", 0.1, 0.2),))
    with pytest.raises(ValueError, match=r'"ps".*\b0 … 0\b'):
        run(waits_for_ps, 1, faults=faults, services={"barrier": of_three})
