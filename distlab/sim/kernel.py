"""Ranks that take turns in one thread, and a clock that only they move.

Each rank is a greenlet: a function that can be left in the middle and entered again.
It runs until it has to wait; then the hub lets the next one run. When all wait, the
clock jumps to the next event. When all wait and no event is left, nobody will ever
go on: that is a deadlock, and it is known at once and for certain.

    hub ──▶ rank 0 … waits ──▶ hub ──▶ rank 1 … waits ──▶ hub ──▶ next event ──▶ rank 0

The order is the same in every run: who became able to run first runs first, and events
of one instant happen in the order in which they were planned.

Limits: the ranks share one process. Each has its own torch generator and grad mode,
swapped at every switch (1 µs); Python's and numpy's generators, the environment and
torch's other settings are shared, because saving numpy's alone takes 30 µs. Code that
never calls the communicator cannot be interrupted.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from distlab.runner import RunnerError
from distlab.sim.links import PS

try:
    import greenlet  # type: ignore[import-untyped,unused-ignore]
except ImportError:  # said in one sentence as soon as one wants to simulate
    greenlet = None

_PATIENCE = 100  # calls after the end of a run that a rank is allowed to catch


class Lost(Exception):  # noqa: N818 - never raised: it marks a flight without a peer
    """The other side has given up its part in the group."""


class Flight:
    """Something that takes time and ends once: what a rank can wait for."""

    __slots__ = ("done", "error", "waiter")

    def __init__(self) -> None:
        self.done = False
        self.error: Exception | None = None
        self.waiter: Fiber | None = None

    def awaited(self) -> tuple[int, ...]:
        """The ranks that would have to act first; none if it is under way."""
        return ()

    def call(self) -> dict[str, Any]:
        """The call it belongs to, with the keys of a journal's event."""
        return {}


class Fiber:
    """One rank: where it stands, and what it finds again when it goes on."""

    __slots__ = ("calls_too_late", "grad", "greenlet", "needs", "random", "rank")

    def __init__(self, rank: int, seed: int) -> None:
        self.rank = rank
        self.greenlet: Any = None
        self.grad = True
        self.random = torch.Generator().manual_seed(seed).get_state()
        self.needs: tuple[Flight, ...] = ()  # what it waits for
        self.calls_too_late = 0


class Kernel:
    """The hub, the clock and the events of one simulated run."""

    def __init__(self) -> None:
        if greenlet is None:
            raise RunnerError(
                "the simulated cluster needs the package greenlet: pip install greenlet"
            )
        self.now_ps = 0
        self.current: Fiber | None = None
        self.fibers: list[Fiber] = []
        self._ready: deque[Fiber] = deque()
        self._instants: list[int] = []  # a heap of the keys of `_events`
        self._events: dict[int, list[Callable[[], object]]] = {}
        self._thread = threading.get_ident()
        self.closing = False
        self._hub: Any = None

    @property
    def now_s(self) -> float:
        """Seconds since the start, on the virtual clock."""
        return self.now_ps / PS

    # ── for the hub ─────────────────────────────────────────────────────────────────

    def run(self, mains: Sequence[Callable[[], object]], seed: int) -> None:
        """Run one rank for each of `mains` until none can go on any more."""
        generator = torch.default_generator
        grad, random = torch.is_grad_enabled(), generator.get_state()
        self._hub = greenlet.getcurrent()
        try:
            for rank, main in enumerate(mains):
                fiber = Fiber(rank, seed + rank)
                fiber.greenlet = greenlet.greenlet(main)
                self.fibers.append(fiber)
            self._ready.extend(self.fibers)
            while self._ready or self._instants:
                self._run_instant()
        finally:
            torch.set_grad_enabled(grad)
            generator.set_state(random)

    def at(self, when_ps: int, event: Callable[[], object]) -> None:
        """Have `event` happen at a time that is not in the past."""
        events = self._events.get(when_ps)
        if events is None:
            self._events[when_ps] = [event]
            heapq.heappush(self._instants, when_ps)
        else:
            events.append(event)

    def _run_instant(self) -> None:
        while self._ready:
            self._resume(self._ready.popleft())
        if self._instants:
            # Events may plan more for this instant: those come in a later round.
            self.now_ps = heapq.heappop(self._instants)
            for event in self._events.pop(self.now_ps):
                event()

    def _resume(self, fiber: Fiber) -> None:
        self.current = fiber
        torch._C._set_grad_enabled(fiber.grad)
        torch.default_generator.set_state(fiber.random)
        fiber.greenlet.switch()
        fiber.grad = torch.is_grad_enabled()
        fiber.random = torch.default_generator.get_state()
        self.current = None

    def close(self) -> None:
        """Let the ranks that still wait unwind; one that refuses is left behind."""
        self.closing = True
        for fiber in self.fibers:
            if not fiber.greenlet.dead:
                self.current = fiber
                fiber.greenlet.throw(greenlet.GreenletExit)
                if not fiber.greenlet.dead:
                    _LEFT_BEHIND.append(fiber.greenlet)
        self.current = None

    @property
    def unwinding(self) -> type[BaseException]:
        """What is thrown into a rank to end it; never caught for good."""
        return greenlet.GreenletExit  # type: ignore[no-any-return]

    # ── for the ranks ───────────────────────────────────────────────────────────────

    def wait(
        self, flight: Flight, limit_ps: int | None, needs: tuple[Flight, ...] = ()
    ) -> bool:
        """Let the others run until `flight` is over; False if the time ran out first.

        `needs` is what the rank waits for in all, where that is more than this flight.
        """
        fiber = self.enter()
        if flight.done:
            return True
        if limit_ps is not None:
            self.at(self.now_ps + limit_ps, partial(self._give_up, flight))
        flight.waiter, fiber.needs = fiber, needs or (flight,)
        self._hub.switch()
        if self.closing:
            raise greenlet.GreenletExit
        flight.waiter, fiber.needs = None, ()
        return flight.done

    def end(self, flight: Flight, error: Exception | None = None) -> None:
        """A flight is over; whoever waits for it can go on."""
        flight.done, flight.error = True, error
        if flight.waiter is not None:
            self._ready.append(flight.waiter)
            flight.waiter = None

    def _give_up(self, flight: Flight) -> None:
        if flight.waiter is not None:
            self._ready.append(flight.waiter)
            flight.waiter = None

    def enter(self) -> Fiber:
        """The rank that calls; every call on a communicator starts here.

        Raises:
            RuntimeError: the call comes from where a rank cannot be left.
        """
        fiber = self.current
        if fiber is None or threading.get_ident() != self._thread:
            raise RuntimeError(
                "a simulated rank has one thread: only the one that runs the program "
                "can call comm"
            )
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "the simulator cannot wait inside backward(): call comm after it"
            )
        if self.closing:
            self._too_late(fiber)
        return fiber

    def _too_late(self, fiber: Fiber) -> None:
        """The run is over: end the rank; if it catches that for ever, leave it."""
        fiber.calls_too_late += 1
        while fiber.calls_too_late > _PATIENCE:
            self._hub.switch()
        raise greenlet.GreenletExit


_LEFT_BEHIND: list[object] = []
"""Ranks that caught their own end; to let go of one would throw it in again."""
