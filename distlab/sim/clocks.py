"""Virtual time, in the form that ranks and services get."""

from __future__ import annotations

from typing import Any

from distlab.sim.channels import Group
from distlab.sim.kernel import Flight, Kernel
from distlab.sim.net.links import picoseconds


class Computing(Flight):
    """A time in which a rank computes, which no other rank can shorten."""

    def call(self) -> dict[str, Any]:
        """Implement `Flight.call`."""
        return {"n": 0, "op": "sleep"}


class SimClock:
    """A rank's clock in virtual time, on which a straggler needs more of it."""

    def __init__(self, world: Group, factor: float = 1.0) -> None:
        self._kernel, self._factor = world.kernel, factor

    def now_s(self) -> float:
        """Implement `Clock.now_s`."""
        return self._kernel.now_s

    def sleep(self, seconds: float) -> None:
        """Implement `Clock.sleep`.

        Raises:
            ValueError: the time is negative or infinite.
        """
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"sleep({seconds}): seconds, 0 or more, and finite")
        kernel, flight = self._kernel, Computing()
        until_ps = kernel.now_ps + picoseconds(seconds * self._factor)
        kernel.at(until_ps, kernel.end, flight)
        kernel.wait(flight, None)


class ServiceClock:
    """A service's clock in virtual time, on which you can't wait."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def now_s(self) -> float:
        """Implement `Clock.now_s`."""
        return self._kernel.now_s

    def sleep(self, seconds: float) -> None:
        """Refuse to wait, because a service must answer at once.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("what serves a call answers at once: it cannot wait")
