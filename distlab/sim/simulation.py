"""One run of simulated ranks on one carrier, and the record that it returns."""

from __future__ import annotations

import copy
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from distlab.comm import ByteMeter, Comm, Event, Journal, Traffic
from distlab.runner import Limits, RankContext, RankRecord
from distlab.runner.autopsy import explain, own_frame
from distlab.runner.rank import raised
from distlab.runner.record import Outcome
from distlab.runner.supervisor import error_record
from distlab.sim.carriers import CarrierName, RankEnded, make_carrier
from distlab.sim.channels import Group
from distlab.sim.clocks import SimClock
from distlab.sim.comm import SimComm
from distlab.sim.conditions import Conditions, SlowWires
from distlab.sim.endpoint import SimEndpoint
from distlab.sim.generators import make_generators
from distlab.sim.kernel import Fiber, Kernel
from distlab.sim.knots import find_knot
from distlab.sim.messages import Fields, Trace
from distlab.sim.net.links import Metered, Wires, picoseconds
from distlab.sim.nodes import Nodes
from distlab.sim.outages import Outages
from distlab.sim.payload import for_rank
from distlab.sim.results import Setup, SimRun, what_struck
from distlab.sim.services import Services
from distlab.sim.store import Shelf, SimStore
from distlab.sim.surroundings import (
    OutOfTime,
    RankDied,
    TimeIsUpError,
    environment_by_rank,
    output_by_rank,
    wall_limit,
)


class Simulation:
    """One run on one carrier, with its kernel and a record for each rank."""

    def __init__(
        self,
        setup: Setup,
        carrier: CarrierName,
        on_report: Callable[[int, Any], None],
        *,
        can_move: bool = False,
        lazy: bool = False,
    ) -> None:
        self._setup, self._carrier = setup, carrier
        self._kernel = Kernel(
            make_carrier(carrier),
            can_move=can_move,
            hide=setup.hide,
            generators=setup.belongings()
            if setup.belongings
            else make_generators(lazy=lazy, every=setup.isolate),
        )
        self._limit_s = setup.limits.seconds if setup.limits else math.inf
        self._limits = setup.limits or Limits()
        self._on_report = on_report
        self._records = [RankRecord(rank=rank) for rank in range(setup.world_size)]
        self._trace: list[Fields] = []
        num_nodes = setup.world_size + len(setup.services)
        faults, wires = setup.faults, setup.net.wires(num_nodes)
        if faults.straggler:
            wires = SlowWires(wires, dict(faults.straggler))
        self._wires: Wires = wires
        self._conditions = None
        if faults or setup.eager_bytes:
            self._conditions = Conditions(self._kernel, faults, setup.eager_bytes)
        self._world = Group(
            self._kernel,
            wires,
            self._trace if setup.trace else None,
            range(setup.world_size),
            self._conditions,
        )
        self._kernel.depart = self._world.depart
        self._nodes, self._shelf = Nodes(faults.seed), Shelf()
        self._services = Services(
            self._world, self._conditions, self._nodes, setup.services
        )
        self._services.when_store_crashes = self._shelf.clear
        self._outages = Outages(self._kernel, self._services, self._die, self._revive)
        self._program: Callable[[RankRecord], Callable[[], None]]
        self._done_s = 0.0
        self._time_is_up: TimeIsUpError | None = None
        self._over = False

    def run(self, program: Callable[..., Any], args: tuple[Any, ...]) -> SimRun:
        """Run the simulation to its end.

        Raises:
            MustMove: this run isn't possible on greenlets.
            DrewLate: this run isn't possible with lazy generators.
            TimeIsUpError: the wall clock ran out, and the setup doesn't allow for it.
        """
        setup = self._setup
        self._program = lambda record: self._main(
            record, program, self._context(record), args
        )
        mains = [self._program(record) for record in self._records]
        with self._surroundings():
            try:
                for name in setup.services:
                    self._services.start(name)
                self._outages.plan(setup.faults)
                try:
                    with wall_limit(
                        self._kernel, setup.wall_limit_s, setup.turn_limit_s
                    ):
                        self._kernel.run(mains, setup.seed, self._late_ps())
                except TimeIsUpError as error:
                    if not setup.times_out:
                        raise
                    self._time_is_up = error
                result = self._conclude()
            finally:
                self._over = True
                self._kernel.close()
        more = self._what_was_lost(result) + what_struck(result)
        return replace(result, explanation=explain(result) + more)

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        kernel, setup = self._kernel, self._setup
        with ExitStack() as stack:
            most = self._limits.output_bytes
            stack.enter_context(
                output_by_rank(kernel, self._records, most, setup.on_output)
            )
            if setup.isolate:
                stack.enter_context(environment_by_rank(kernel, setup.world_size))
            yield

    def _late_ps(self) -> dict[int, int]:
        late = self._setup.faults.late
        return {rank: picoseconds(seconds) for rank, seconds in late.items()}

    def _die(self, rank: int) -> bool:
        """End a rank's process now; return False if it had ended before."""
        is_alive = self._kernel.kill(rank)
        if is_alive:
            record = self._records[rank]
            record.status, record.exit_status = "died", signal.SIGKILL
            record.failed_s = self._kernel.now_s
            self._done_s = self._kernel.now_s
            self._world.reap(rank)
        return is_alive

    def _revive(self, rank: int) -> None:
        """Restart a rank's program; the record then describes its new life."""
        self._records[rank] = record = RankRecord(rank=rank)
        self._kernel.restart(rank, self._program(record), self._setup.seed)

    def _what_was_lost(self, result: SimRun) -> str:
        """Name the lost messages for which a rank still waits."""
        waited = {
            (peer, rank) for rank, peers in result.waits_for.items() for peer in peers
        }
        lost = [loss for loss in result.lost if (loss.src, loss.dst) in waited]
        more = f" (and {len(lost) - 1} more were)" if len(lost) > 1 else ""
        return f"; {lost[0]}{more}" if lost else ""

    def _context(self, record: RankRecord) -> RankContext:
        traffic, per_node = Traffic(), self._setup.ranks_per_node
        local_rank = record.rank % per_node if per_node else record.rank
        place = (self._world, record.rank, self._limit_s)
        if not self._setup.journal or self._setup.payload == "size":
            comm: Comm = SimComm(*place, traffic, local_rank=local_rank)
        else:  # as on real ranks: what looks through the layers finds the same ones
            comm = SimComm(*place, local_rank=local_rank)
            comm = ByteMeter(comm, traffic)

        def tell(event: Event) -> None:
            # How the ranks that were still waiting are ended is no part of the run.
            if not self._over and len(record.journal) < self._limits.journal_events:
                # Of the process and the wall clock a simulated rank knows nothing.
                own = {"t": self._kernel.now_s, "thread": 0, "threads": 1}
                event.update((key, own[key]) for key in own if key in event)
                record.journal.append(event)

        if self._setup.journal:
            comm = Journal(comm, tell)
        return self._handed(record, comm, traffic)

    def _handed(self, record: RankRecord, comm: Comm, traffic: Traffic) -> RankContext:
        rank = record.rank
        factor = self._setup.faults.straggler.get(rank, 1.0)

        def report(value: Any) -> None:
            record.marks.append(len(record.journal))
            self._on_report(rank, value)

        return RankContext(
            comm=comm,
            traffic=traffic,
            report=report,
            clock=SimClock(self._world, factor),
            store=SimStore(self._services, self._shelf, rank),
            endpoint=SimEndpoint(self._services, rank, tuple(self._setup.services)),
            disk=self._nodes.disk(rank),
        )

    def _main(
        self,
        record: RankRecord,
        program: Callable[..., Any],
        context: RankContext,
        args: tuple[Any, ...],
    ) -> Callable[[], None]:
        return lambda: self._live(record, program, context, args)

    def _live(
        self,
        record: RankRecord,
        program: Callable[..., Any],
        context: RankContext,
        args: tuple[Any, ...],
    ) -> None:
        """Run one rank, and keep any error that it raises in its record."""
        try:
            own = for_rank(
                copy.deepcopy(args),
                self._setup.payload,
                record.rank,
                self._setup.world_size,
            )
            value = _called(program, context, own)
        except (RankEnded, OutOfTime, KeyboardInterrupt):
            raise  # the run is over; the user at the keyboard means us, not a rank
        except RankDied as death:
            record.status, record.exit_status = "died", death.status
            record.failed_s = self._kernel.now_s
            self._world.reap(record.rank)
        except BaseException as error:
            record.error = error_record(raised(error))
            record.status, record.failed_s = "raised", self._kernel.now_s
        else:
            record.status, record.value = "finished", value
            traffic = context.traffic
            record.sent_bytes, record.messages = traffic.sent_bytes, traffic.messages
        finally:
            self._services.finish(record.rank)
        self._done_s = self._kernel.now_s

    def _conclude(self) -> SimRun:
        waits_for: dict[int, tuple[int, ...]] = {}
        any_of: set[int] = set()
        for fiber in self._kernel.fibers:
            if not (fiber.strand.dead or fiber.killed):
                peers = {peer for need in fiber.needs for peer in need.awaited()}
                waits_for[fiber.rank] = tuple(sorted(peers))
                if any(need.one_is_enough for need in fiber.needs):
                    any_of.add(fiber.rank)
                record = self._records[fiber.rank]
                if not fiber.needs:  # it ran when the time was up, or was about to
                    continue
                record.status = "waiting"
                record.waiting = _blocked_in(record) or _seen_from_outside(fiber)
        if self._time_is_up and self._kernel.ran_last:
            self._records[self._kernel.ran_last.rank].stack = self._time_is_up.frames
        conditions, wires = self._conditions, self._wires
        return SimRun(
            world_size=len(self._records),
            outcome=self._outcome(waits_for),
            ranks=tuple(self._records),
            seconds=self._done_s if not waits_for else self._kernel.now_s,
            limit_s=self._limit_s,
            waits_for={} if self._time_is_up else waits_for,
            cycle=() if self._time_is_up else find_knot(waits_for, any_of),
            trace=Trace(self._trace),
            carrier=self._carrier,
            lost=tuple(conditions.lost) if conditions else (),
            num_duplicates=conditions.num_duplicates if conditions else 0,
            links=wires.usage() if isinstance(wires, Metered) else {},
            service_messages=tuple(self._services.messages),
            service_errors=dict(self._services.errors),
            struck=self._outages.until(self._done_s if not waits_for else None),
        )

    def _outcome(self, waits_for: dict[int, tuple[int, ...]]) -> Outcome:
        if self._time_is_up:
            return "timeout"
        if any(record.status == "died" for record in self._records):
            return "died"
        if any(record.status == "raised" for record in self._records):
            return "raised"
        return "deadlock" if waits_for else "finished"


def _called(program: Callable[..., Any], context: RankContext, args: Any) -> Any:
    # A call with a star is a C call, and puts half a kilobyte on the C stack, which is
    # saved and restored each time a greenlet is left and entered.
    match args:
        case ():
            return program(context)
        case (one,):
            return program(context, one)
        case (one, two):
            return program(context, one, two)
    return program(context, *args)


def _blocked_in(record: RankRecord) -> Event | None:
    """Return the call in which a rank stopped, its last entry in the journal."""
    last = record.journal[-1] if record.journal else None
    if last is None or last["k"] not in ("enter", "wait"):
        return None
    return next(call for call in record.calls() if call["n"] == last["n"])


def _seen_from_outside(fiber: Fiber) -> Event:
    """Return the call in which a rank without a journal waits, and its line."""
    frames, frame = [], fiber.strand.frame()
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    file, line = own_frame(tuple(reversed(frames))) or ("", 0)
    place = {"file": file, "line": line, "via": None}
    return {"dst": None, "src": None, "tag": 0, **fiber.needs[0].call(), **place}
