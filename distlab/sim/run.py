"""Run a program on simulated ranks, in this process, and say how it ended.

    from distlab.sim import AlphaBeta, run
    done = run(program, 256, net=AlphaBeta(alpha_s=5e-6, bytes_per_s=1e9))
    done.time_s, done.trace, done.values

`program` is a function of a `RankContext`, the same that `Cluster.run` takes, and what
comes back is the same `Run`: every judgement on real ranks holds for these.
"""

from __future__ import annotations

import copy
import io
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from distlab.comm import ByteMeter, Event, Journal
from distlab.runner import RankContext, RankRecord, Run
from distlab.runner.autopsy import explain, own_frame
from distlab.runner.board import find_cycle
from distlab.runner.limits import Limits
from distlab.runner.rank import raised
from distlab.runner.record import Outcome
from distlab.runner.supervisor import error_record
from distlab.sim.channels import Group, Message
from distlab.sim.comm import SimComm
from distlab.sim.kernel import Fiber, Kernel
from distlab.sim.links import AlphaBeta, Network

MAX_RANKS = 4096


@dataclass(frozen=True, kw_only=True)
class SimRun(Run):
    """A Run in virtual time; `trace` has every message, in the order they started."""

    trace: tuple[Message, ...] = field(default=(), repr=False)

    @property
    def time_s(self) -> float:
        """Virtual seconds until the last rank was done, or stuck."""
        return self.seconds


def run(
    program: Callable[..., Any],
    world_size: int,
    *args: Any,
    net: Network | None = None,
    seed: int = 0,
    journal: bool = True,
    limits: Limits | None = None,
    on_report: Callable[[int, Any], None] | None = None,
) -> SimRun:
    """Run `program(context, *args)` on `world_size` simulated ranks to its end.

    Each rank gets a copy of `args` and a torch generator seeded with `seed` + rank. Of
    `limits` hold what is kept per rank, and `seconds`, virtual here, as the limit
    beyond which a timeout counts as none. Without a journal a run is nearly twice as
    fast, and less can be said about how it ended.

    Raises:
        ValueError: fewer than 1 or more than 4,096 ranks.
        RunnerError: the package greenlet is not installed.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(
            f"{world_size} ranks: choose between 1 and {MAX_RANKS} simulated ones"
        )
    simulation = _Simulation(world_size, net or AlphaBeta(), limits, on_report, journal)
    return simulation.run(program, args, seed)


class _Simulation:
    """One run: its kernel, and a record for each rank."""

    def __init__(
        self,
        world_size: int,
        net: Network,
        limits: Limits | None,
        on_report: Callable[[int, Any], None] | None,
        journal: bool,
    ) -> None:
        self._kernel = Kernel()
        self._limit_s = limits.seconds if limits else math.inf
        self._limits = limits or Limits()
        self._on_report = on_report or (lambda rank, value: None)
        self._journal = journal
        self._records = [RankRecord(rank=rank) for rank in range(world_size)]
        self._trace: list[Message] = []
        wires = net.wires(world_size)
        self._world = Group(self._kernel, wires, self._trace, range(world_size))
        self._done_s = 0.0
        self._over = False

    def run(
        self, program: Callable[..., Any], args: tuple[Any, ...], seed: int
    ) -> SimRun:
        contexts = [self._context(record) for record in self._records]
        mains = [
            partial(self._live, record, program, context, args)
            for record, context in zip(self._records, contexts, strict=True)
        ]
        with _output_by_rank(self._kernel, self._records, self._limits.output_bytes):
            try:
                self._kernel.run(mains, seed)
                result = self._conclude()
            finally:
                self._over = True
                self._kernel.close()
        return replace(result, explanation=explain(result))

    def _context(self, record: RankRecord) -> RankContext:
        meter = ByteMeter(SimComm(self._world, record.rank, self._limit_s))

        def tell(event: Event) -> None:
            # How the ranks that were still waiting are ended is no part of the run.
            if not self._over and len(record.journal) < self._limits.journal_events:
                # Of the process and the wall clock a simulated rank knows nothing.
                own = {"t": self._kernel.now_s, "thread": 0, "threads": 1}
                event.update((key, own[key]) for key in own if key in event)
                record.journal.append(event)

        return RankContext(
            comm=Journal(meter, tell) if self._journal else meter,
            traffic=meter.traffic,
            report=partial(self._on_report, record.rank),
        )

    def _live(
        self,
        record: RankRecord,
        program: Callable[..., Any],
        context: RankContext,
        args: tuple[Any, ...],
    ) -> None:
        """One rank's life; whatever it raises stays in its record."""
        try:
            value = program(context, *copy.deepcopy(args))
        except (self._kernel.unwinding, KeyboardInterrupt):
            raise  # the run is over; the user at the keyboard means us, not a rank
        except BaseException as error:
            record.error = error_record(raised(error))
            record.status, record.failed_s = "raised", self._kernel.now_s
        else:
            record.status, record.value = "finished", value
            traffic = context.traffic
            record.sent_bytes, record.messages = traffic.sent_bytes, traffic.messages
        self._done_s = self._kernel.now_s

    def _conclude(self) -> SimRun:
        waits_for: dict[int, tuple[int, ...]] = {}
        for fiber in self._kernel.fibers:
            if not fiber.greenlet.dead:
                peers = {peer for need in fiber.needs for peer in need.awaited()}
                waits_for[fiber.rank] = tuple(sorted(peers))
                record = self._records[fiber.rank]
                record.status = "waiting"
                record.waiting = _blocked_in(record) or _seen_from_outside(fiber)
        return SimRun(
            world_size=len(self._records),
            outcome=self._outcome(waits_for),
            ranks=tuple(self._records),
            seconds=self._done_s if not waits_for else self._kernel.now_s,
            limit_s=self._limit_s,
            waits_for=waits_for,
            cycle=find_cycle(waits_for),
            trace=tuple(self._trace),
        )

    def _outcome(self, waits_for: dict[int, tuple[int, ...]]) -> Outcome:
        if any(record.status == "raised" for record in self._records):
            return "raised"
        return "deadlock" if waits_for else "finished"


def _blocked_in(record: RankRecord) -> Event | None:
    """The call in which a rank stopped: it wrote nothing after it entered that one."""
    last = record.journal[-1] if record.journal else None
    if last is None or last["k"] not in ("enter", "wait"):
        return None
    return next(call for call in record.calls() if call["n"] == last["n"])


def _seen_from_outside(fiber: Fiber) -> Event:
    """The same for a rank that writes no journal: what it needs, and its own line."""
    frames, frame = [], fiber.greenlet.gr_frame
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    file, line = own_frame(tuple(reversed(frames))) or ("", 0)
    place = {"file": file, "line": line, "via": None}
    return {"dst": None, "src": None, "tag": 0, **fiber.needs[0].call(), **place}


class _ByRank(io.TextIOBase):
    """What is written goes to the rank that runs; outside of ranks, where it went."""

    def __init__(
        self, kernel: Kernel, records: list[RankRecord], most: int, otherwise: Any
    ) -> None:
        self._kernel, self._records, self._most = kernel, records, most
        self._otherwise = otherwise

    def write(self, text: str) -> int:
        """Keep `text`, as far as there is room for it."""
        if self._kernel.current is None:
            self._otherwise.write(text)
        elif not self._kernel.closing:
            record = self._records[self._kernel.current.rank]
            record.output += text[: max(0, self._most - len(record.output))]
        return len(text)

    def close(self) -> None:
        """A rank that closes it must not close it for the others."""


@contextmanager
def _output_by_rank(
    kernel: Kernel, records: list[RankRecord], most: int
) -> Iterator[None]:
    out, err = sys.stdout, sys.stderr
    sys.stdout = _ByRank(kernel, records, most, out)
    sys.stderr = _ByRank(kernel, records, most, err)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
