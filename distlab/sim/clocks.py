"""Virtual time, as ranks and services are handed it."""

from __future__ import annotations

from typing import Any

from distlab.sim.channels import Group
from distlab.sim.kernel import Flight, Kernel
from distlab.sim.net.links import picoseconds


class Computing(Flight):
    """Time that a rank needs for itself: nobody else can shorten it."""

    def call(self) -> dict[str, Any]:
        """See `Flight.call`."""
        return {"n": 0, "op": "sleep"}


class SimClock:
    """Virtual time; a straggler needs more of it."""

    def __init__(self, world: Group, factor: float = 1.0) -> None:
        self._kernel, self._factor = world.kernel, factor

    def now_s(self) -> float:
        """See `Clock.now_s`."""
        return self._kernel.now_s

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`.

        Raises:
            ValueError: a negative time, or one without an end.
        """
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"sleep({seconds}): seconds, 0 or more, and finite")
        kernel, flight = self._kernel, Computing()
        until_ps = kernel.now_ps + picoseconds(seconds * self._factor)
        kernel.at(until_ps, kernel.end, flight)
        kernel.wait(flight, None)


class ServiceClock:
    """The same for a service, which cannot wait."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def now_s(self) -> float:
        """See `Clock.now_s`."""
        return self._kernel.now_s

    def sleep(self, seconds: float) -> None:
        """Refused: what serves a call answers at once.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("what serves a call answers at once: it cannot wait")
