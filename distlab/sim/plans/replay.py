"""Run a program once, then compute its time under a thousand sets of stragglers.

In most programs, the next step of a rank doesn't depend on the data. A run is then a
fixed net of waits, and its times follow from two rules:

    a rank goes on    at the latest of the things that it waits for
    a message ends    at the later of its two ends' calls, plus its own time

Because these are only maxima and sums, we can compute all scenarios side by side, as
vectors. A straggler with factor f computes f times as long, and needs f times as long
for every byte that it sends or receives. For a message between two stragglers, the
slower one counts. `Faults` defines stragglers in the same way.

This holds as long as no two messages have to take turns on a link. We check that in
every scenario, and `replay` refuses if they do.

Source: F. Baccelli et al., "Synchronization and Linearity" (1992): max-plus algebra.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from distlab.runner import RankContext
from distlab.sim.net.links import PS, AlphaBeta, Network, Ports
from distlab.sim.plans.recorder import RankSteps, RecordedStep, Recorder, in_order
from distlab.sim.run import run

Times = npt.NDArray[np.int64]
"""Picoseconds, one number for each scenario."""

_MOST = 4_000_000  # times of messages kept at once: some 100 MB


class Hop(NamedTuple):
    """A message of the recorded run."""

    src: int
    dst: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One run of a program, as a record of which step waited for which."""

    world_size: int
    net: Network
    time_s: float
    steps: list[RecordedStep] = field(
        repr=False
    )  # of all ranks, in an order that works
    messages: list[Hop] = field(repr=False)  # by the numbers in `steps`

    def replay(self, factors: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Return each scenario's virtual seconds; `factors` is scenarios × ranks.

        A rank with the factor 1 isn't a straggler.

        Raises:
            ValueError: a factor isn't above 0, the number of ranks differs, or in one
                scenario, two messages would have to take turns on a link.
        """
        table = np.atleast_2d(np.asarray(factors, dtype=np.float64))
        if table.ndim != 2 or table.shape[1] != self.world_size:
            raise ValueError(
                f"factors are of shape {table.shape}: a row for each scenario, in it "
                f"one for each of {self.world_size} ranks"
            )
        if not (np.isfinite(table) & (table > 0)).all():
            raise ValueError("a straggler's factor must be above 0 and finite")
        block = max(1, _MOST // max(1, len(self.messages)))
        starts = range(0, len(table), block)
        ports = _ports(self.net, self.world_size)
        parts = [self._block(_Pace(table[i : i + block], ports)) for i in starts]
        return np.concatenate([np.zeros(0), *parts])

    def _block(self, pace: _Pace) -> npt.NDArray[np.float64]:
        nothing: Times = np.zeros(pace.num_scenarios, dtype=np.int64)
        ranks = [nothing] * self.world_size
        starts = [nothing] * len(self.messages)
        ends = [nothing] * len(self.messages)
        for rank, kind, value in self.steps:
            if kind == "compute":
                ranks[rank] = ranks[rank] + pace.compute(value, rank)
            elif kind == "wait":
                ranks[rank] = np.maximum(ranks[rank], ends[value])
            else:  # post: after the second of them the end is known
                starts[value] = np.maximum(starts[value], ranks[rank])
                ends[value] = starts[value] + pace.message(self.messages[value])[0]
        self._require_free_ways(pace, starts)
        done: Times = np.maximum.reduce(ranks)
        return done / PS

    def _require_free_ways(self, pace: _Pace, starts: list[Times]) -> None:
        ways: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for number, message in enumerate(self.messages):
            ways["out of", message.src].append(number)
            ways["into", message.dst].append(number)
        for (way, rank), numbers in ways.items():
            if self._meet(pace, numbers, starts):
                raise ValueError(
                    f"messages take turns on the way {way} rank {rank}: that cannot be "
                    "replayed, only run"
                )

    def _meet(self, pace: _Pace, numbers: list[int], starts: list[Times]) -> bool:
        """Return True if two of these messages overlap in any scenario."""
        busy = [pace.message(self.messages[number])[1] for number in numbers]
        start = np.stack([starts[number] for number in numbers], axis=1)
        free = start + np.stack(busy, axis=1)  # (scenarios, messages)
        order = np.argsort(start, axis=1, kind="stable")
        start = np.take_along_axis(start, order, axis=1)
        free = np.take_along_axis(free, order, axis=1)
        return bool((start[:, 1:] < free[:, :-1]).any())


class _Pace:
    """The durations in each scenario, each of which is computed once."""

    def __init__(self, table: npt.NDArray[np.float64], ports: Ports) -> None:
        self.num_scenarios = len(table)
        self._factors = np.ascontiguousarray(table.T)
        self._ports = ports
        self._computing: dict[tuple[int, int], Times] = {}
        self._messages: dict[Hop, tuple[Times, Times]] = {}

    def compute(self, took_ps: int, rank: int) -> Times:
        """Return how long the rank takes for this if it isn't a straggler."""
        key = (took_ps, rank)
        if key not in self._computing:
            slowed = np.rint(took_ps * self._factors[rank])
            self._computing[key] = slowed.astype(np.int64)
        return self._computing[key]

    def message(self, hop: Hop) -> tuple[Times, Times]:
        """Return the message's time, and how much of it keeps its two ends busy."""
        if hop not in self._messages:
            slower = np.maximum(self._factors[hop.src], self._factors[hop.dst])
            sizes = np.rint(hop.num_bytes * slower).astype(np.int64)
            distinct, which = np.unique(sizes, return_inverse=True)
            costs = np.array([self._ports.alone(int(size)) for size in distinct])
            self._messages[hop] = costs[which, 0], costs[which, 1]
        return self._messages[hop]


def record(
    program: Callable[..., Any],
    world_size: int,
    *args: Any,
    net: Network | None = None,
    seed: int = 0,
) -> Recording:
    """Run `program(context, *args)` once, and record which step waited for which.

    Raises:
        ValueError: the program doesn't finish, uses collectives or `recv(ANY)`, or its
            messages take turns on a link.
    """
    net = net or AlphaBeta()
    wires = net.wires(world_size)
    if type(wires) is not Ports:
        raise ValueError("links that pairs share cannot be replayed, only run")
    logs = [RankSteps(rank) for rank in range(world_size)]

    def recorded(context: RankContext, *args: Any) -> None:
        log = logs[context.rank]
        program(replace(context, comm=Recorder(context.comm, log)), *args)
        log.reach(context.comm.time())

    done = run(recorded, world_size, *args, net=net, seed=seed, journal=False)
    if done.outcome != "finished":
        errors = [rank.error.message for rank in done.ranks if rank.error]
        raise ValueError(errors[0] if errors else done.explanation)
    steps, messages = in_order(logs)
    recording = Recording(
        world_size=world_size,
        net=net,
        time_s=done.time_s,
        steps=steps,
        messages=[Hop(*message) for message in messages],
    )
    replayed_s = recording.replay(np.ones((1, world_size)))[0]
    assert abs(replayed_s - done.time_s) <= 1e-9 * done.time_s, "the two rules hold"
    return recording


def _ports(net: Network, world_size: int) -> Ports:
    """Return each rank's links in and out, if messages share nothing else.

    Raises:
        ValueError: they do, or the time of a message depends on others.
    """
    wires = net.wires(world_size)
    if type(wires) is not Ports:
        raise ValueError("links that pairs share cannot be replayed, only run")
    return wires
