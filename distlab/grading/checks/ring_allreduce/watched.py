"""A communicator that makes a mistake of timing show every time, and says whose it is.

On a fast machine a tensor that is touched while it is under way is nearly always as if
it had not been: the message was quicker. Here it never is. What irecv is to fill holds
NaN until its wait, and only then what came; what isend was given travels as it was at
that moment, and is compared at the wait.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from distlab.comm import Call, Comm, Work, Wrapper

T = TypeVar("T")
READ_EARLY = "used a tensor between its irecv and the wait"
WRITTEN = "wrote into a tensor between its irecv and the wait"
SENT_CHANGED = "changed a tensor between its isend and the wait"
FILLED = "received into a tensor that it was still sending"
TWICE = "received into one tensor twice at the same time"
EXPECTED = {
    READ_EARLY: "wait() before the first use",
    WRITTEN: "wait() before any use",
    SENT_CHANGED: "no change until the wait",
    FILLED: "the isend's wait() first",
    TWICE: "wait() between the two",
}


@dataclass(eq=False)
class Flight:
    """A tensor under way; `copy` is what it held when it was sent."""

    op: str
    tensor: Tensor
    copy: Tensor | None = None

    def overlaps(self, other: Tensor) -> bool:
        """Whether they have a byte in common."""
        (start, end), (first, last) = _span(self.tensor), _span(other)
        return start < last and first < end


class WatchedComm(Wrapper):
    """Keep an eye on tensors under way; `sins` has what was done to them, and where."""

    def __init__(self, inner: Comm, unit: ModuleType) -> None:
        super().__init__(inner)
        self._unit = unit
        self._flights: list[Flight] = []
        self.sins: list[tuple[str, int]] = []

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Send it as it is now."""
        self._look(Call(op="isend", sent=tensor))
        flight = Flight("isend", tensor, tensor.clone())
        assert flight.copy is not None
        return self._started(flight, self._inner.isend(flight.copy, dst, tag))

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Work:
        """Receive beside it: it is filled at the wait."""
        self._look(Call(op="irecv", received=tensor))
        flight = Flight("irecv", tensor, torch.empty_like(tensor))
        assert flight.copy is not None
        work = self._inner.irecv(flight.copy, src, tag)
        tensor.fill_(torch.nan)
        return self._started(flight, work)

    def _around(self, call: Call, proceed: Callable[[], T]) -> T:
        self._look(call)
        return proceed()

    def _look(self, call: Call) -> None:
        """At what is handed in: is it free?"""
        if call.sent is not None and bool(call.sent.isnan().any()):
            self.sin(READ_EARLY)
        if call.received is None:
            return
        for flight in self._flights:
            if flight.overlaps(call.received):
                self.sin(FILLED if flight.op == "isend" else TWICE)

    def _started(self, flight: Flight, work: Work) -> Work:
        self._flights.append(flight)
        return _WatchedWork(self, flight, work)

    def landed(self, flight: Flight) -> None:
        """Its wait is over: was it left alone? From now on it is the caller's."""
        if flight not in self._flights:
            return
        self._flights.remove(flight)
        assert flight.copy is not None
        if flight.op == "irecv":
            if not bool(flight.tensor.isnan().all()):
                self.sin(WRITTEN)
            flight.tensor.copy_(flight.copy)
        elif not torch.equal(flight.tensor, flight.copy):
            self.sin(SENT_CHANGED)

    def sin(self, what: str) -> None:
        """Write it down, with the line of the unit that calls."""
        frame: FrameType | None = sys._getframe(1)
        while frame and frame.f_globals is not vars(self._unit):
            frame = frame.f_back
        self.sins.append((what, frame.f_lineno if frame else 0))


@dataclass(eq=False)
class _WatchedWork:
    _comm: WatchedComm
    _flight: Flight
    _work: Work
    _waited: bool = field(default=False)

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Work.wait`."""
        self._work.wait(timeout_s)
        if not self._waited:
            self._waited = True
            self._comm.landed(self._flight)

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        return self._work.is_completed()


def _span(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.nbytes
