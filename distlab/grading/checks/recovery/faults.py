"""Scripts for 4.7: what becomes of processes and generations, in virtual time.

No process runs: a script says how long each process imports and lives, what happens to
the ranks of each generation, and which events come late or twice.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from signal import SIGINT, SIGTERM
from typing import Any

from distlab.given.process_group import SIGKILL
from distlab.grading.kit.launcher_actions import Fact

NUM_RANDOM, SIZES = 120, (1, 2, 3, 4, 5)
STEP_S, IMPORT_S, KILLED_IN_S = 1.0, 2.0, 0.01
_LATE_STEP = 5  # so much higher is the number in a late Completed


@dataclass(frozen=True)
class Life:
    """A process by itself: until it is ready, until it ends, and after SIGTERM."""

    ready_s: float = IMPORT_S
    after_s: float = inf  # from its start to its end
    code: int = 1
    stops_in_s: float = 0.5  # inf: it ignores SIGTERM


@dataclass(frozen=True)
class ProcessFault:
    """What happens to the process of a rank, so long after the group was formed."""

    after_s: float
    code: int = -SIGKILL
    kind: str = "ended"  # or "frozen", or "both": it ends, and is named afterwards


@dataclass(frozen=True)
class Crash:
    """Whenever a generation would complete this step, this rank fails instead."""

    step: int
    rank: int
    codes: tuple[int, ...]  # of the first time, of the second …


@dataclass(frozen=True, kw_only=True)
class Script:
    """A supervisor's numbers, and what happens."""

    world_size: int = 3
    num_standbys: int = 1
    max_restarts: int = 10
    window_s: float = 1000.0
    max_failures: int = 4
    grace_s: float = 5.0
    lives: dict[int, Life] = field(default_factory=dict)  # by order of the starts
    faults: dict[tuple[int, int], ProcessFault] = field(
        default_factory=dict
    )  # generation, rank
    crash: Crash | None = None
    num_steps: int = 6
    goes_back: int = 0  # so many steps a new generation repeats
    is_stale: bool = False  # events of the last generation come once more
    interrupt_s: float = inf
    signal: int = int(SIGTERM)  # that interrupts it
    ticks_s: tuple[float, ...] = ()  # that came without having been asked for
    late_s: float = 0.0  # from the time of a WakeAt to its Tick


def _at(
    *where: tuple[int, int], after_s: float = 2.5, **how: Any
) -> dict[Any, ProcessFault]:
    return {place: ProcessFault(after_s, **how) for place in where}


def _many(
    rank: int, after_s: float = 2.5, codes: tuple[int, ...] = (1,)
) -> dict[Any, ProcessFault]:
    return {
        (g, rank): ProcessFault(after_s, codes[g % len(codes)]) for g in range(1, 30)
    }


_IGNORES = Life(stops_in_s=inf)
_BROKEN = {k: Life(inf, 1.0, 1 + k % 3) for k in range(4, 40)}  # imports and fails
BY_HAND = (
    Script(),
    Script(num_standbys=0),
    Script(world_size=1, num_standbys=2),
    Script(lives={0: Life(7.0), 2: Life(3.0), 3: Life(1.0)}),
    Script(faults=_at((1, 1))),
    Script(faults=_at((1, 0))),
    Script(faults=_at((1, 2), code=3), num_standbys=0),
    Script(faults=_at((1, 0)) | _at((1, 2), after_s=2.6)),
    Script(faults=_at((1, 0)) | _at((1, 2), after_s=2.6), num_standbys=3),
    Script(faults=_at((1, 1)) | _at((2, 0), after_s=0.1), num_standbys=2),
    Script(faults=_at((1, 1)) | _at((2, 1), after_s=0.1)),
    Script(faults=_at((1, 0), (1, 1), (1, 2)), num_standbys=0),
    Script(faults=_at((1, 2)), lives={3: Life(1.0, 3.0)}),
    Script(lives={3: Life(1.0, 4.2, 0)}, faults=_at((1, 1), after_s=3.5)),
    Script(lives={1: Life(inf, 1.0, 9)}),
    Script(lives={k: Life(inf, 1.0, 9) for k in range(30)}, max_restarts=4),
    Script(lives={k: Life(inf, 1.0, 0) for k in range(30)}, max_restarts=4),
    Script(faults=_at((1, 1), kind="frozen")),
    Script(faults=_at((1, 0), kind="frozen"), is_stale=True, num_standbys=2),
    Script(faults=_at((1, 0), kind="both", code=7), is_stale=True),
    Script(faults=_at((1, 1)) | _at((2, 1), kind="frozen"), is_stale=True),
    Script(faults=_many(1, 3.5), is_stale=True, num_standbys=2, num_steps=14),
    Script(faults=_many(2, 2.5, (3, 7, 5)), max_restarts=2, max_failures=9),
    Script(faults=_many(2, 2.5, (4, 6)), max_restarts=0, num_standbys=2,
           max_failures=9),
    Script(faults=_many(0, 30.5), max_restarts=1, window_s=20.0, num_steps=150),
    Script(faults=_many(0, 6.5), max_restarts=2, window_s=20.0, num_steps=60),
    Script(lives=_BROKEN, faults=_at((1, 1), code=5), max_restarts=3),
    Script(lives=_BROKEN | {3: Life(1.0, 3.0, 4)}, max_restarts=3, num_steps=20),
    Script(lives=_BROKEN | {3: Life(1.0, 3.0, 4)}, max_restarts=3, num_steps=20,
           faults=_at((1, 2), after_s=12.5, code=6)),
    Script(crash=Crash(3, 1, (3, 4, 5, 6, 7)), max_restarts=20, num_standbys=2),
    Script(crash=Crash(1, 0, (-11, 4, 5, 6)), max_restarts=20, max_failures=3),
    Script(crash=Crash(5, 0, (8, 2, 6, 7)), max_restarts=20, max_failures=3,
           goes_back=3, num_standbys=2),
    Script(crash=Crash(4, 2, (8, 2, 6, 7)), max_restarts=20, max_failures=3,
           is_stale=True, num_standbys=2),
    Script(crash=Crash(4, 2, (8, 2)), max_restarts=20, max_failures=1),
    Script(faults=_many(1, 2.5, (5, 6)), max_restarts=20, num_steps=12,
           max_failures=3),
    # Several are started at once, and then the limit counts each of them.
    Script(faults=_at((1, 0), after_s=3.5, code=0) | _at((1, 1), after_s=6.5)
           | _at((2, 2)), lives={3: Life(2.5, 7.0)}, max_restarts=3, num_steps=20),
    Script(faults=_at((1, 0), (1, 2), (2, 2)), max_restarts=2, num_standbys=0,
           num_steps=20),
    # Members that end after a failure, and others, are no further failures.
    Script(faults=_at((1, 0)) | _at((1, 2), after_s=2.6), num_standbys=0,
           max_failures=2),
    Script(faults=_at((1, 0)), lives={k: Life(inf, 1.0, 9) for k in range(3, 6)},
           num_standbys=0, max_failures=3),
    Script(interrupt_s=4.5, is_stale=True),
    Script(interrupt_s=1.5, signal=int(SIGINT)),
    # The limit allows one restart of two, and the standbys make up for the other.
    Script(faults=_at((1, 0), (1, 1)), num_standbys=2, max_restarts=1,
           is_stale=True),
    Script(faults=_at((1, 0), (1, 1)), num_standbys=1, max_restarts=1),
    Script(interrupt_s=4.6, faults=_at((1, 1)), lives={3: Life(9.0)}),
    Script(interrupt_s=4.5, lives={1: _IGNORES, 3: _IGNORES}),
    Script(interrupt_s=4.5, lives={1: _IGNORES}, late_s=0.3, ticks_s=(2.0, 6.0)),
    Script(faults=_at((1, 0), after_s=6.15, code=2)),
    Script(lives={3: Life(1.0, 8.15)}, faults=_at((1, 2), after_s=inf)),
)  # fmt: skip


@lru_cache(maxsize=4)
def scripts(seed: int) -> tuple[Script, ...]:
    """Those above, and some that depend on the seed."""
    draw = random.Random(seed)
    return (*BY_HAND, *(_random_script(draw) for _ in range(NUM_RANDOM)))


def _random_script(draw: random.Random) -> Script:
    def seconds(least: float, most: float) -> float:
        return round(draw.uniform(least, most), 1) + draw.randint(1, 99) / 10_000

    n = draw.choice(SIZES)
    lives = {
        order: Life(
            seconds(0.1, 6),
            draw.choice((inf, inf, inf, seconds(0.1, 12))),
            draw.choice((0, 1, 1, 3, 3, -9, -9)),
            draw.choice((0.5, 0.5, seconds(0.1, 9), inf)),
        )
        for order in draw.sample(range(20), 8)
    }
    faults = {
        (draw.randint(1, 6), draw.randrange(n)): ProcessFault(
            draw.choice((seconds(0, 0.3), seconds(0, 5), 2.5)),
            draw.choice((1, 3, -9, -11)),
            draw.choice(("ended", "ended", "frozen", "both")),
        )
        for _ in range(draw.randint(0, 6))
    }
    codes = tuple(draw.choice((1, 2, 5, -6)) for _ in range(9))
    crash = Crash(draw.randint(1, 5), draw.randrange(n), codes)
    return Script(
        world_size=n,
        num_standbys=draw.randint(0, 3),
        max_restarts=draw.choice((0, 1, 2, 4, 20)),
        window_s=draw.choice((5.0, 15.0, 1000.0)) + 0.0123,
        max_failures=draw.randint(2, 5),
        lives=lives,
        faults=faults,
        crash=draw.choice((None, None, crash)),
        goes_back=draw.choice((0, 0, 1, 2)),
        is_stale=draw.random() < 0.5,
        interrupt_s=draw.choice((inf, inf, inf, seconds(0.5, 15))),
        ticks_s=tuple(seconds(0.1, 20) for _ in range(draw.randint(0, 2))),
        late_s=draw.choice((0.0, seconds(0.1, 0.4))),
    )


class RecoveringProcesses:
    """The processes of a script: which events come, when, given the actions."""

    def __init__(self, script: Script) -> None:
        self.script, self.now_s = script, 0.0
        self.order: dict[int, int] = {}  # process → how many were started before
        self.alive: set[int] = set()
        self.members: dict[int, int] = {}
        self.generation = self.newest = self.num_crashes = 0
        self.coming: list[tuple[float, int, Fact]] = []
        self.num_events = 0
        self.wake_at_s = inf
        self._in(0.0, ("begin",))
        for at_s in script.ticks_s:
            self._in(at_s, ("tick",))
        if script.interrupt_s < inf:
            self._in(script.interrupt_s, ("interrupted", script.signal))

    def _in(self, seconds: float, event: Fact) -> None:
        if seconds < inf:
            self.num_events += 1
            when = self.now_s + seconds, self.num_events, event
            heapq.heappush(self.coming, when)

    def events(self) -> Iterator[Fact]:
        """One after another, at `now_s`, while any comes."""
        while self.coming:
            self.now_s, _, event = heapq.heappop(self.coming)
            if (fact := self._happens(*event)) is not None:
                yield fact

    def _happens(self, kind: str, *values: Any) -> Fact | None:
        """The event that the supervisor is given, if it still comes."""
        if kind == "wake":
            if values[0] != self.wake_at_s:
                return None  # a later WakeAt has replaced it
            self.wake_at_s = inf
            return ("tick",)
        if kind == "step":
            if values[1] == self.generation and self._is_running():
                self._complete(values[0])
            return None
        if kind == "again":
            return values
        if kind in ("ready", "ended", "frozen") and values[0] not in self.alive:
            return None
        if kind == "ended":
            self.alive.discard(values[0])
        return kind, *values

    def _is_running(self) -> bool:
        return self.alive >= set(self.members.values())

    def _complete(self, step: int) -> None:
        crash, g = self.script.crash, self.generation
        if crash and crash.step == step and self.num_crashes < len(crash.codes):
            code = crash.codes[self.num_crashes]
            self.num_crashes += 1
            self._in(0.0, ("ended", self.members[crash.rank], code))
            return
        self.newest = max(step, self.newest)
        self._in(0.0, ("again", "completed", step, g))
        if self.script.is_stale:
            self._in(0.02, ("again", "completed", step, g))
        if step < self.script.num_steps:
            self._in(STEP_S, ("step", step + 1, g))
            return
        for rank, process in self.members.items():
            self._in(0.1 * (rank + 1), ("ended", process, 0))

    def act(self, action: Fact) -> None:
        """Do what the supervisor wants."""
        match action:
            case ("start", process):
                life = self.script.lives.get(len(self.order), Life())
                self.order[process] = len(self.order)
                self.alive.add(process)
                self._in(life.ready_s, ("ready", process))
                self._in(life.after_s, ("ended", process, life.code))
            case ("signal", process, number) if process in self.alive:
                life = self.script.lives.get(self.order[process], Life())
                in_s = KILLED_IN_S if number == SIGKILL else life.stops_in_s
                self._in(in_s, ("ended", process, -int(number)))
            case ("form", generation, members):
                self._form(generation, dict(members))
            case ("wake", at_s):
                self.wake_at_s = at_s
                self._in(at_s + self.script.late_s - self.now_s, ("wake", at_s))
            case ("finish", _):
                self.coming.clear()

    def _form(self, generation: int, members: dict[int, int]) -> None:
        if self.script.is_stale and self.members:
            late = self.newest + _LATE_STEP, self.generation
            self._in(0.05, ("again", "completed", *late))
            for process in self.members.values():
                gone = process not in self.alive
                event = ("ended", process, 1) if gone else ("ready", process)
                self._in(0.06, ("again", *event))
                self._in(0.07, ("again", "frozen", process, self.generation))
        self.generation, self.members = generation, members
        begin = max(self.newest - self.script.goes_back, 0)
        self._in(STEP_S, ("step", begin + 1, generation))
        for rank, process in members.items():
            fault = self.script.faults.get((generation, rank), ProcessFault(inf))
            if fault.kind != "frozen":
                self._in(fault.after_s, ("ended", process, fault.code))
            if fault.kind == "frozen":
                self._in(fault.after_s, ("frozen", process, generation))
            if fault.kind == "both":
                named = "again", "frozen", process, generation
                self._in(fault.after_s + 0.1, named)
