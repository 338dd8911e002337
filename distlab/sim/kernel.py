"""Let ranks take turns, with a clock that only they move.

Each rank is a strand (a greenlet or a thread, see carriers), which is a function that
can be left in the middle and entered again. It runs until it has to wait, and then the
next one runs. When all ranks wait, the clock jumps to the next event. If no event is
left either, no rank will ever continue. That is a deadlock, so we can detect it
immediately and with certainty.

    rank 0 … waits ──▶ rank 1 … waits ──▶ next event: rank 0 has its answer ──▶ rank 0 …

The order is the same in every run and on both carriers. The rank that could run first
runs first, and events of the same instant happen in the order in which they were
planned.

Limits: the ranks share one process. Each has its own torch generator and grad mode.
They share Python's and numpy's generators and the environment, unless you call `run`
with `isolate`. They always share torch's other settings and module globals.
"""

from __future__ import annotations

import gc
import heapq
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from distlab.sim.carriers import Carrier, RankEnded, Strand
from distlab.sim.generators import Generators, make_generators
from distlab.sim.net.links import PS

T = TypeVar("T")

_OBJECTS = 50_000  # made before Python looks for those that can go
_PATIENCE = 100  # calls after the end of a run that a rank is allowed to catch


class GaveUp(Exception):  # noqa: N818 - never raised: it marks a flight without a peer
    """Raised if the other side has given up its part in the group."""


class MustMove(Exception):  # noqa: N818 - the run is in order, but not possible here
    """Raised if a rank wants to wait inside backward(), so the run needs threads."""


class Flight:
    """An operation that takes time and ends once, and for which a rank can wait."""

    __slots__ = ("done", "error", "waiter")

    def __init__(self) -> None:
        self.done = False
        self.error: Exception | None = None
        self.waiter: Fiber | None = None

    def awaited(self) -> tuple[int, ...]:
        """Return the ranks that must act first; none if the operation has started."""
        return ()

    @property
    def one_is_enough(self) -> bool:
        """Return True if any one of the awaited ranks could end it alone."""
        return False

    def call(self) -> dict[str, Any]:
        """Return the call it belongs to, with the keys of a journal's event."""
        return {}


class Fiber:
    """One rank: where it has stopped, and the state that it needs to continue."""

    __slots__ = (
        *("calls_too_late", "frozen", "killed", "needs", "numbers", "rank", "started"),
        *("strand", "switch"),
    )

    def __init__(self, rank: int, strand: Strand, numbers: Any) -> None:
        self.rank, self.strand = rank, strand
        self.switch: Any = strand.switch  # enters it, if the carrier needs do no more
        self.started = self.killed = self.frozen = False
        self.numbers = numbers  # random ones, of its own
        self.needs: tuple[Flight, ...] = ()  # what it waits for
        self.calls_too_late = 0


class Kernel:
    """The clock, the events and the turns of one simulated run.

    With `can_move`, a call inside backward() on a greenlet ends the run with MustMove.
    With `hide`, the torch modes of a rank don't see what the kernel computes meanwhile.
    """

    def __init__(
        self,
        carrier: Carrier,
        *,
        can_move: bool = False,
        generators: Generators | None = None,
        hide: bool = False,
    ) -> None:
        self._hide = hide
        self.now_ps = 0
        self.current: Fiber | None = None
        self.ran_last: Fiber | None = None  # when the run came to its end
        self.fibers: list[Fiber] = []
        self._replaced: list[Fiber] = []  # of ranks that were started again
        self._held: list[Fiber] = []  # could go on, and are frozen
        self.closing = self._must_move = False
        self.at_work = False  # in a rank's thread, on what all ranks have a part in
        self._carrier, self._can_move = carrier, can_move
        self.generators = generators or make_generators(lazy=False, every=False)
        # Whether ranks can hand over by themselves, as `fast` does: on this thread (0
        # when the run is over), and as soon as all ranks have started.
        self.thread_id = carrier.hub.thread_id
        self.num_unstarted = 0
        self.hands_over = carrier.hands_over and self.generators.word is not None
        self.mode: Any = carrier  # where it is kept whether gradients are on
        self.ready: deque[Fiber] = deque()
        self._instants: list[int] = []  # a heap of the keys of `events`
        self.events: dict[int, list[Callable[[], object]]] = {}
        # Messages that set off at this instant: `depart` books them all together.
        self.met: list[Any] = []
        self.depart: Callable[[], None] = self.met.clear
        self._timers: list[tuple[int, int, Flight]] = []  # a heap
        self._num_timers = 0
        self.handler: Fiber | None = None  # of the rank that answers a call
        self.when_idle: list[Callable[[], bool]] = []  # each: is there more to do?
        self._next_from_hub: Fiber | None = None
        self._broken: BaseException | None = None

    @property
    def now_s(self) -> float:
        """Seconds since the start, on the virtual clock."""
        return self.now_ps / PS

    # ── for the hub ─────────────────────────────────────────────────────────────────

    def run(
        self,
        mains: Sequence[Callable[[], object]],
        seed: int,
        late_ps: Mapping[int, int] | None = None,
    ) -> None:
        """Run one rank for each of `mains` until none can continue.

        `late_ps` says which of them start later than at 0.
        """
        threads, collecting = torch.get_num_threads(), gc.get_threshold()
        torch.set_num_threads(1)  # a rank is one process on one core
        # A thousand ranks hold a million objects: to look at them more rarely saves a
        # tenth of the time.
        gc.set_threshold(max(_OBJECTS, collecting[0]), *collecting[1:])
        try:
            self.num_unstarted = len(mains)
            for rank, main in enumerate(mains):
                strand = self._carrier.strand(main)
                numbers = self.generators.own(seed + rank)
                self.fibers.append(Fiber(rank, strand, numbers))
            for fiber in self.fibers:
                if late_ps and fiber.rank in late_ps:
                    self.at(late_ps[fiber.rank], self.ready.append, fiber)
                else:
                    self.ready.append(fiber)
            while (following := self._take_turn()) is not None:
                self._enter(following)
        finally:
            self.ran_last, self.current = self.current, None
            self.depart()
            torch.set_num_threads(threads)
            gc.set_threshold(*collecting)
            self.generators.restore()

    def _take_turn(self) -> Fiber | None:
        fiber, self._next_from_hub = self._next_from_hub, None
        if self._broken is not None:
            raise self._broken
        if self._must_move:
            raise MustMove
        return fiber or self._next()

    def kill(self, rank: int) -> bool:
        """End a rank's process for good; return False if it had finished before.

        Its strand is unwound at the end of the run, without any visible effect.
        """
        fiber = self.fibers[rank]
        if fiber.killed or fiber.strand.dead:
            return False
        fiber.killed = True
        return True

    def restart(self, rank: int, main: Callable[[], object], seed: int) -> None:
        """Restart a killed rank, with a program at its beginning."""
        strand, own = self._carrier.strand(main), self.generators.own(seed + rank)
        self._replaced.append(self.fibers[rank])
        self.fibers[rank] = Fiber(rank, strand, own)
        self.num_unstarted += 1
        self.ready.append(self.fibers[rank])

    def freeze(self, rank: int) -> bool:
        """Stop a rank from continuing; return False if it had finished before."""
        fiber = self.fibers[rank]
        fiber.frozen = not (fiber.killed or fiber.strand.dead)
        return fiber.frozen

    def thaw(self, rank: int) -> None:
        """Let a rank continue; if it could before, it is now the last in line."""
        self.fibers[rank].frozen = False
        self.ready += [fiber for fiber in self._held if not fiber.frozen]
        self._held = [fiber for fiber in self._held if fiber.frozen]

    def runs(self, rank: int) -> bool:
        """Return True if the caller is this rank's own program."""
        here = self.current is self.fibers[rank]
        return here and self.fibers[rank].strand.thread_id == _thread_id()

    def is_idle(self, num_instants: int) -> bool:
        """Return True if only events of this many instants are left."""
        self.depart()
        waits = any(flight.waiter is not None for _, _, flight in self._timers)
        return not (self.ready or waits) and len(self._instants) <= num_instants

    def close(self) -> None:
        """Let the ranks that still wait unwind; leave behind any that refuses."""
        self._begin_closing()
        for fiber in [*self._replaced, *self.fibers]:
            if fiber.started and not fiber.strand.dead:
                self.current = fiber
                self._carrier.switch(fiber.strand)
                if not fiber.strand.dead:
                    _LEFT_BEHIND.append(fiber.strand)
        self.current = None
        self._carrier.close()

    def at(self, when_ps: int, event: Callable[..., object], *args: Any) -> None:
        """Schedule `event(*args)` for a time that isn't in the past."""
        act = partial(event, *args) if args else event
        self.depart()  # they came first
        if when_ps in self.events:
            self.events[when_ps].append(act)
        else:
            self.events[when_ps] = [act]
            heapq.heappush(self._instants, when_ps)

    def _enter(self, fiber: Fiber) -> None:
        if fiber.started:
            self.generators.put(fiber.numbers)
        else:
            self.generators.begin(fiber.numbers)
            self.num_unstarted -= 1
        self.current, fiber.started = fiber, True
        self._carrier.switch(fiber.strand)
        if self.current is not None:  # it did not stop: it has come to its end
            self.generators.take(self.current.numbers)
        self.current = None

    def _next(self) -> Fiber | None:
        """Return the rank that runs next, moving the clock if necessary, or None."""
        ready, instants = self.ready, self._instants
        while True:
            while not ready:
                self.depart()
                if not instants and any(more() for more in self.when_idle):
                    continue
                if self._timers and self._next_gives_up():
                    continue
                if not instants:
                    return None
                # Events may plan more for this instant: those come in a later round.
                self.now_ps = heapq.heappop(instants)
                for event in self.events.pop(self.now_ps):
                    event()
            fiber = ready.popleft()
            if fiber.frozen:
                self._held.append(fiber)
            elif not fiber.killed:
                return fiber

    def _next_gives_up(self) -> bool:
        """Return True if the next event is that a rank's time limit ends.

        Anything that happens at that very instant is still in time. Timers of flights
        that are over don't move the clock.
        """
        timers, instants = self._timers, self._instants
        while timers and timers[0][2].waiter is None:
            heapq.heappop(timers)
        if not timers or (instants and instants[0] <= timers[0][0]):
            return False
        self.now_ps, _, flight = heapq.heappop(timers)
        assert flight.waiter is not None
        self.ready.append(flight.waiter)
        flight.waiter = None
        return True

    def on_behalf_of(self, rank: int | None, act: Callable[[], T]) -> T:
        """Call `act()` as an event at a rank, which may be waiting."""
        before, self.current = self.current, None
        self.handler = None if rank is None else self.fibers[rank]
        try:
            return act()
        finally:
            self.current, self.handler = before, None

    # ── for the ranks ───────────────────────────────────────────────────────────────

    def wait(
        self, flight: Flight, limit_ps: int | None, needs: tuple[Flight, ...] = ()
    ) -> bool:
        """Let the others run until `flight` ends; return False if time ran out first.

        `needs` is everything that the rank waits for, if that is more than this flight.
        """
        fiber = self.enter()
        return flight.done or self.wait_in(fiber, flight, limit_ps, needs)

    def wait_in(
        self,
        fiber: Fiber,
        flight: Flight,
        limit_ps: int | None,
        needs: tuple[Flight, ...],
    ) -> bool:
        """Do what `wait` does, for a rank that has entered and an unfinished flight."""
        if limit_ps is not None:
            self._num_timers += 1
            timer = (self.now_ps + limit_ps, self._num_timers, flight)
            heapq.heappush(self._timers, timer)
        flight.waiter, fiber.needs = fiber, needs or (flight,)
        self.pause(fiber)
        flight.waiter, fiber.needs = None, ()
        return flight.done

    def end(self, flight: Flight, error: Exception | None = None) -> None:
        """End a flight, so that the ranks that wait for it can continue."""
        flight.done, flight.error = True, error
        if flight.waiter is not None:
            self.ready.append(flight.waiter)
            flight.waiter = None

    def pause(self, fiber: Fiber) -> None:
        """Pass control to the next rank, which may be this one."""
        following: Fiber | None = None
        self.at_work = True
        try:
            if self._hide:
                with _disable_current_modes():
                    following = self._next()
            else:
                following = self._next()
            if following is fiber:
                return
            self.generators.take(fiber.numbers)
        except BaseException as error:  # not the rank's own: the hub raises it
            self._broken, following = error, None
        finally:
            self.at_work = False
        if following is not None and following.started:
            self.current = following
            self._carrier.switch(following.strand)
        else:
            # Only the hub starts strands: a greenlet stands on the one it began in.
            self._next_from_hub, self.current = following, None
            self._carrier.switch(self._carrier.hub)
        if self.closing:
            raise RankEnded
        self.current = fiber
        self.generators.put(fiber.numbers)

    def enter(self) -> Fiber:
        """Return the rank that calls; every call on a communicator starts here.

        Raises:
            RuntimeError: the call comes from a place where we can't leave a rank.
        """
        fiber = self.current
        if fiber is None or _thread_id() != fiber.strand.thread_id:
            if self.handler is not None:
                raise RuntimeError("what serves a call answers at once: it cannot wait")
            raise RuntimeError(
                "a simulated rank has one thread: only the one that runs the program "
                "can call comm"
            )
        if self.closing:
            self._too_late(fiber)
        if _graph_task_id() != -1:
            self._inside_backward()
        return fiber

    def _inside_backward(self) -> None:
        if self._carrier.can_leave_backward:
            return
        if not self._can_move:
            raise RuntimeError(
                "a greenlet cannot wait inside backward(): call comm after it, or run "
                'the simulation with carrier="threads"'
            )
        self._must_move = True
        self._begin_closing()
        raise RankEnded

    def _begin_closing(self) -> None:
        self.closing, self.thread_id = True, 0

    def _too_late(self, fiber: Fiber) -> None:
        """End the rank because the run is over; leave it if it keeps catching that."""
        fiber.calls_too_late += 1
        while fiber.calls_too_late > _PATIENCE:
            self._carrier.switch(self._carrier.hub)
        raise RankEnded


_thread_id = threading.get_ident
_graph_task_id = torch._C._current_graph_task_id

_LEFT_BEHIND: list[object] = []
"""Ranks that caught their own end; freeing one would raise it there again."""
