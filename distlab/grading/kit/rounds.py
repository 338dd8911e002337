"""Counting rounds in virtual time, also where a rank starts its messages all at once.

The simulator gives a message its turn on the links of both ranks when the second of its
two calls is made. A rank that starts all its messages, before another rank runs, would
get turns on all links ahead of the others, which no network does. Here ranks alternate:
a rank starts a message, then all other ranks may.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from distlab.comm import Call, Clock, Comm, Wrapper
from distlab.grading.runs import Runs, RunSpec
from distlab.runner import RankContext

T = TypeVar("T")

MOMENT_S = 1e-6  # where a message takes one second; one passes with every isend
ROUNDING = 0.01  # of a round: what `alternating` adds is far less


def num_rounds(runs: Runs, spec: RunSpec) -> int:
    """How many rounds a run `in_rounds` takes whose ranks are `alternating`."""
    time_s: float = runs.simulated(spec)["time_s"]
    return math.ceil(time_s - ROUNDING)


@contextmanager
def alternating(context: RankContext) -> Iterator[Comm]:
    """This rank's communicator, such that ranks take turns in starting messages."""
    comm = _Alternating(context.comm, context.clock)
    yield comm
    comm.start_all()


class _Alternating(Wrapper):
    """Starts what does not block when the rank blocks next: receives, then sends."""

    def __init__(self, inner: Comm, clock: Clock) -> None:
        super().__init__(inner)
        self._clock = clock
        self._waiting: list[_Later] = []

    def _around(self, call: Call, proceed: Callable[[], T]) -> T:
        if call.op in ("isend", "irecv"):
            later = _Later(self, call.op == "isend", proceed)
            self._waiting.append(later)
            return cast(T, later)
        self.start_all()
        return proceed()

    def start_all(self) -> None:
        """Start the receives, and then the sends in their order, a moment each."""
        waiting, self._waiting = self._waiting, []
        for later in sorted(waiting, key=lambda one: one.is_send):
            if later.is_send:
                self._clock.sleep(MOMENT_S)
            later.start()


class _Later:
    """The Work of a message that is started later, by `wait` at the latest."""

    def __init__(
        self, comm: _Alternating, is_send: bool, proceed: Callable[[], Any]
    ) -> None:
        self._comm, self.is_send, self._proceed = comm, is_send, proceed
        self._work: Any = None

    def start(self) -> None:
        """Start the message."""
        self._work = self._proceed()

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Work.wait`."""
        self._comm.start_all()
        self._work.wait(timeout_s)

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        return self._work is not None and bool(self._work.is_completed())
