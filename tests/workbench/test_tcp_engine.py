"""Who holds the engine's lock while its sockets are looked at."""

from __future__ import annotations

import pytest

from distlab.comm.tcp.engine import ExchangeDriver
from distlab.comm.tcp.exchange import Exchange


class Looked:
    """In place of a poller: notes whether the lock is held while it is asked."""

    def __init__(self, engine: ExchangeDriver) -> None:
        self._engine = engine
        self.locked: list[bool] = []

    def poll(self, timeout_s: float | None = None) -> list[tuple[int, int]]:
        self.locked.append(self._engine.lock.locked())
        return []


@pytest.mark.parametrize(("timeout_s", "kept"), [(0.0, True), (0.5, False)])
def test_only_a_look_that_waits_lets_others_in(timeout_s: float, kept: bool) -> None:
    # Else the one that stands by takes in a message, and the rank that has just begun
    # to drive sleeps for it: once in some thousand rounds of a parameter server.
    engine = ExchangeDriver(Exchange(0, []))
    own, looked = engine._poller, Looked(engine)
    engine._poller = looked
    with engine.lock:
        engine._serve(timeout_s)
        assert engine.lock.locked()
    engine._poller = own
    engine.close()
    assert looked.locked == [kept]
