"""A call in flight: the operation that a rank waits for, and its messages' way."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from distlab.comm import CommRefusedError
from distlab.comm._refusals import Refusals
from distlab.sim.channels import Channel, End, Group
from distlab.sim.kernel import Fiber, Flight
from distlab.sim.payload import Sized


class Waits(Protocol):
    """The methods that a call in flight needs of its communicator."""

    group: Group

    def await_in(
        self,
        fiber: Fiber,
        flight: Flight,
        needs: tuple[Flight, ...],
        timeout_s: float | None,
        peer: int | None,
        step: int,
    ) -> None:
        """Wait for `flight`, as part of a call that needs all of `needs`."""


class SimWork:
    """A simulated transfer in flight."""

    __slots__ = ("_comm", "_flight", "_peer", "_step")

    def __init__(
        self, comm: Waits, flight: Flight, peer: int | None, step: int
    ) -> None:
        self._comm, self._flight, self._peer, self._step = comm, flight, peer, step

    def wait(self, timeout_s: float | None = None) -> None:
        """Implement `Work.wait`."""
        flight, kernel = self._flight, self._comm.group.kernel
        fiber = kernel.enter()
        self._comm.await_in(fiber, flight, (flight,), timeout_s, self._peer, self._step)
        if isinstance(flight, End) and flight.parcel is not None:
            flight.parcel.require_unchanged(flight)

    def is_completed(self) -> bool:
        """Implement `Work.is_completed`; asking takes no time."""
        return self._flight.done


class Route:
    """The channel to or from one peer with one tag, and an end to be reused.

    A blocking call leaves nothing behind that could still refer to its end.
    """

    __slots__ = ("channel", "spare")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.spare: End | None = None


def can_travel(tensor: Any) -> bool:
    """Return True for a plain tensor whose elements are contiguous in memory."""
    kind = type(tensor)
    return kind is Sized or (
        kind is Tensor and tensor.is_cpu and tensor.is_contiguous()
    )


def look_closer(refuse: Refusals, tensor: object, op: str) -> None:
    """Refuse a tensor that can't be sent; a Parameter, for example, can."""
    if isinstance(tensor, Sized):
        return
    refuse.tensor(tensor, op)  # type: ignore[arg-type]
    assert isinstance(tensor, Tensor)
    if not tensor.is_cpu:
        raise CommRefusedError(
            f"{op} got a tensor on {tensor.device}: it must live on comm.device, "
            "which is cpu"
        )
