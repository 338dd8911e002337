"""One run of simulated ranks on one carrier, and the record that comes out of it."""

from __future__ import annotations

import copy
import hashlib
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from distlab.comm import ByteMeter, Comm, Event, Journal, Traffic
from distlab.runner import Limits, RankContext, RankRecord, Run
from distlab.runner.autopsy import explain, own_frame
from distlab.runner.rank import raised
from distlab.runner.record import Outcome
from distlab.runner.supervisor import error_record
from distlab.sim.carriers import CarrierName, RankEnded, make_carrier
from distlab.sim.channels import Group
from distlab.sim.comm import SimComm
from distlab.sim.conditions import Conditions, Loss, SlowWires
from distlab.sim.faults import Faults
from distlab.sim.generators import make_generators
from distlab.sim.kernel import Fiber, Kernel
from distlab.sim.knots import find_knot
from distlab.sim.messages import Fields, Trace
from distlab.sim.net.links import Metered, Network, Wires, picoseconds
from distlab.sim.net.quantities import time_words
from distlab.sim.payload import PAYLOADS, Payload, for_rank
from distlab.sim.services import Services, SimClock, SimEndpoint, SimStore
from distlab.sim.surroundings import (
    OutOfTime,
    environment_by_rank,
    output_by_rank,
    wall_limit,
)

MAX_RANKS = 4096


@dataclass(frozen=True, kw_only=True)
class SimRun(Run):
    """A Run in virtual time; `trace` has every message, in the order they started.

    `lost` are the messages that faults took, `num_duplicates` counts those that arrived
    twice, `links` has the picoseconds for which each link of the network was busy.
    """

    trace: Trace = field(default_factory=Trace, repr=False)

    carrier: CarrierName = "greenlets"
    lost: tuple[Loss, ...] = ()
    num_duplicates: int = 0
    links: dict[str, int] = field(default_factory=dict, repr=False)

    @property
    def time_s(self) -> float:
        """Virtual seconds until the last rank was done, or stuck."""
        return self.seconds

    @property
    def took(self) -> str:
        """See `Run.took`; nobody must take it for the time that they waited."""
        return f"{time_words(self.seconds)} of simulated time"

    @property
    def trace_hash(self) -> str:
        """32 hexadecimal digits that are the same if and only if the traces are.

        Of every message, of every call in the journals with its time (collectives leave
        their trace only there), and of the end of the run.
        """
        digest = hashlib.blake2b(digest_size=16)
        for row in self.trace.rows:
            digest.update(b"%d %d %d %d %d %d\n" % row)
        for record in self.ranks:
            for event in record.journal:
                told = (event.get(name) for name in ("k", "n", "op", "bytes", "t"))
                digest.update(repr((record.rank, *told)).encode())
        digest.update(repr(self.seconds).encode())
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What `run` was asked for, apart from the program."""

    world_size: int
    net: Network
    limits: Limits | None
    journal: bool
    seed: int
    payload: Payload
    eager_bytes: int
    faults: Faults
    trace: bool
    isolate: bool
    wall_limit_s: float | None
    turn_limit_s: float | None

    def __post_init__(self) -> None:
        if not 1 <= self.world_size <= MAX_RANKS:
            raise ValueError(
                f"{self.world_size} ranks: choose between 1 and {MAX_RANKS} simulated "
                "ones"
            )
        if self.payload not in PAYLOADS:
            known = ", ".join(PAYLOADS)
            raise ValueError(f"payload {self.payload!r}: choose one of {known}")
        if self.eager_bytes < 0:
            raise ValueError(
                f"eager_bytes is {self.eager_bytes}: a number of bytes, 0 or more"
            )
        for name in ("wall_limit_s", "turn_limit_s"):
            limit_s = getattr(self, name)
            if limit_s is not None and not limit_s > 0:
                raise ValueError(f"{name} is {limit_s}: seconds, above 0, or None")
        self.faults.check(self.world_size)


class Simulation:
    """One run on one carrier: its kernel, and a record for each rank."""

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
            generators=make_generators(lazy=lazy, every=setup.isolate),
        )
        self._limit_s = setup.limits.seconds if setup.limits else math.inf
        self._limits = setup.limits or Limits()
        self._on_report = on_report
        self._records = [RankRecord(rank=rank) for rank in range(setup.world_size)]
        self._trace: list[Fields] = []
        faults, wires = setup.faults, setup.net.wires(setup.world_size)
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
        self._services = Services(self._world, self._conditions)
        self._done_s = 0.0
        self._over = False

    def run(self, program: Callable[..., Any], args: tuple[Any, ...]) -> SimRun:
        """The whole run, to its end.

        Raises:
            MustMove: it is not possible on greenlets.
            DrewLate: it is not possible with lazy generators.
            RunnerError: the wall clock ran out.
        """
        setup = self._setup
        contexts = [self._context(record) for record in self._records]
        mains = [
            self._main(record, program, context, args)
            for record, context in zip(self._records, contexts, strict=True)
        ]
        with self._surroundings():
            try:
                self._plan_deaths()
                with wall_limit(self._kernel, setup.wall_limit_s, setup.turn_limit_s):
                    self._kernel.run(mains, setup.seed, self._late_ps())
                result = self._conclude()
            finally:
                self._over = True
                self._kernel.close()
        more = self._what_was_lost(result) + _who_died(result)
        return replace(result, explanation=explain(result) + more)

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        kernel, setup = self._kernel, self._setup
        with ExitStack() as stack:
            most = self._limits.output_bytes
            stack.enter_context(output_by_rank(kernel, self._records, most))
            if setup.isolate:
                stack.enter_context(environment_by_rank(kernel, setup.world_size))
            yield

    def _late_ps(self) -> dict[int, int]:
        late = self._setup.faults.late
        return {rank: picoseconds(seconds) for rank, seconds in late.items()}

    def _plan_deaths(self) -> None:
        for rank, seconds in self._setup.faults.kill.items():
            self._kernel.at(picoseconds(seconds), self._die, rank)

    def _die(self, rank: int) -> None:
        if self._kernel.kill(rank):
            record = self._records[rank]
            record.status, record.exit_status = "died", signal.SIGKILL
            record.failed_s = self._kernel.now_s
            self._done_s = self._kernel.now_s
            self._world.reap(rank)
            self._services.reap(rank)

    def _what_was_lost(self, result: SimRun) -> str:
        """The lost messages that somebody still waits for, as the end of a sentence."""
        waited = {
            (peer, rank) for rank, peers in result.waits_for.items() for peer in peers
        }
        lost = [loss for loss in result.lost if (loss.src, loss.dst) in waited]
        more = f" (and {len(lost) - 1} more were)" if len(lost) > 1 else ""
        return f"; {lost[0]}{more}" if lost else ""

    def _context(self, record: RankRecord) -> RankContext:
        traffic = Traffic()
        if not self._setup.journal or self._setup.payload == "size":
            comm: Comm = SimComm(self._world, record.rank, self._limit_s, traffic)
        else:  # as on real ranks: what looks through the layers finds the same ones
            comm = SimComm(self._world, record.rank, self._limit_s)
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
        return RankContext(
            comm=comm,
            traffic=traffic,
            report=partial(self._on_report, rank),
            clock=SimClock(self._world, factor),
            store=SimStore(self._services, rank),
            endpoint=SimEndpoint(self._services, rank),
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
        """One rank's life; whatever it raises stays in its record."""
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
                record.status = "waiting"
                record.waiting = _blocked_in(record) or _seen_from_outside(fiber)
        conditions, wires = self._conditions, self._wires
        return SimRun(
            world_size=len(self._records),
            outcome=self._outcome(waits_for),
            ranks=tuple(self._records),
            seconds=self._done_s if not waits_for else self._kernel.now_s,
            limit_s=self._limit_s,
            waits_for=waits_for,
            cycle=find_knot(waits_for, any_of),
            trace=Trace(self._trace),
            carrier=self._carrier,
            lost=tuple(conditions.lost) if conditions else (),
            num_duplicates=conditions.num_duplicates if conditions else 0,
            links=wires.usage() if isinstance(wires, Metered) else {},
        )

    def _outcome(self, waits_for: dict[int, tuple[int, ...]]) -> Outcome:
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


def _who_died(result: SimRun) -> str:
    """When the ranks that were killed died, as the end of a sentence."""
    return "".join(
        f"; rank {record.rank} died at {time_words(record.failed_s or 0.0)}"
        for record in result.ranks
        if record.status == "died"
    )


def _blocked_in(record: RankRecord) -> Event | None:
    """The call in which a rank stopped: it wrote nothing after it entered that one."""
    last = record.journal[-1] if record.journal else None
    if last is None or last["k"] not in ("enter", "wait"):
        return None
    return next(call for call in record.calls() if call["n"] == last["n"])


def _seen_from_outside(fiber: Fiber) -> Event:
    """The same for a rank that writes no journal: what it needs, and its own line."""
    frames, frame = [], fiber.strand.frame()
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    file, line = own_frame(tuple(reversed(frames))) or ("", 0)
    place = {"file": file, "line": line, "via": None}
    return {"dst": None, "src": None, "tag": 0, **fiber.needs[0].call(), **place}
