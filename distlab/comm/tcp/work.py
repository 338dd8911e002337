"""A transfer or collective in progress on sockets, which reports a lost peer."""

from __future__ import annotations

import time

from distlab.comm._protocol import PeerLost
from distlab.comm.tcp.engine import ExchangeDriver
from distlab.comm.tcp.flights import Flight, LostPeer, Transfer

_LEAST_S = 0.001  # the shortest wait there is on gloo, to which 0 means no limit


class TcpWork:
    """A `Work` that waits for `peer`, a rank of the group, or None for several."""

    def __init__(
        self,
        engine: ExchangeDriver,
        flight: Flight,
        peer: int | None,
        step: int,
        timeout_s: float,
    ) -> None:
        self._engine, self._flight, self._peer = engine, flight, peer
        self._step, self._timeout_s = step, timeout_s

    def wait(self, timeout_s: float | None = None) -> None:
        """Implement `Work.wait`."""
        flight = self._flight
        if flight.done and flight.error is None:
            return
        started = time.monotonic()
        limit_s = self._timeout_s if timeout_s is None else max(timeout_s, _LEAST_S)
        in_time = self._engine.wait(flight, limit_s)
        if in_time and flight.error is None:
            return
        if not in_time and isinstance(flight, Transfer):
            self._give_up()
        if in_time and not isinstance(flight.error, LostPeer):
            assert flight.error is not None
            raise flight.error
        waited_s = time.monotonic() - started
        rank = flight.group.rank
        raise PeerLost(rank, self._step, self._peer, waited_s) from flight.error

    def is_completed(self) -> bool:
        """Implement `Work.is_completed`."""
        return self._flight.done

    def _give_up(self) -> None:
        """Close this rank's connections in the group when it gives up, as gloo does."""
        engine, group = self._engine, self._flight.group
        engine.post(lambda: engine.exchange.leave(group))
