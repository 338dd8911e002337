"""Services that are no ranks: nodes of their own in a simulated run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from distlab.comm import PeerLost, ServiceContext
from distlab.comm.services import PeerGone, Started, Tick, WakeAt
from distlab.runner import RankContext
from distlab.sim import AlphaBeta, Faults, run

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
    ("service", "reply", "errors"),
    [
        (
            lambda context: Broken("handle"),
            "RuntimeError: the service \"ps\" could not answer: KeyError: 'momentum'",
            {},
        ),
        (
            lambda context: Broken("start"),
            'PeerLost: rank 0 lost the service "ps" in call #1 after waiting 0.00 s',
            {"ps": 'the service "ps" could not start: OSError: no log'},
        ),
        (
            lambda context: Broken("action", "soon"),
            'PeerLost: rank 0 lost the service "ps" in call #1 after waiting 0.00 s',
            {
                "ps": 'the service "ps" could not go on after Started(): TypeError: '
                "on gave 'soon': a service can ask for WakeAt(seconds)"
            },
        ),
    ],
)
def test_a_service_that_fails(service: Any, reply: str, errors: dict[str, str]) -> None:
    done = run(asks_ps, 1, net=NET, services={"ps": service})
    assert done.values == [reply]
    assert done.service_errors == errors
    for text in errors.values():
        assert done.explanation.endswith(text)


def asks_ps(ctx: RankContext) -> str:
    assert ctx.endpoint
    try:
        return ctx.endpoint.call("ps", b"?", 1.0).decode()
    except (PeerLost, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


class Ticks:
    """Never stops."""

    def handle(self, peer: int, message: bytes) -> bytes | None:
        return None

    def on(self, event: object, now_s: float) -> Sequence[object]:
        return [WakeAt(now_s)]


def test_a_service_that_ticks_forever_hides_no_deadlock() -> None:
    done = run(waits_for_ps, 1, services={"ps": lambda context: Ticks()})
    assert done.outcome == "deadlock"
    assert done.explanation == "rank 0 waits in call ps, which no rank answers"


def waits_for_ps(ctx: RankContext) -> None:
    assert ctx.endpoint
    ctx.endpoint.call("ps", b"?", float("inf"))


def test_what_is_refused() -> None:
    explanation = run(waits_for_ps, 2).explanation
    assert 'call to "ps", but there is only rank 0 … 1' in explanation
    with pytest.raises(ValueError, match="'store' is no name for a service"):
        run(waits_for_ps, 1, services={"store": of_three})
    faults = Faults(freeze=(("ps", 0.1, 0.2),))
    with pytest.raises(ValueError, match='"ps", but there is only rank 0 … 0 and'):
        run(waits_for_ps, 1, faults=faults, services={"barrier": of_three})
