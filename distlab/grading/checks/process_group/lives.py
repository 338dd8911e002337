"""Scripts for 3.18: what becomes of each process, and the contract of a `Launcher`.

No process runs: a script says how long each one lives, how it ends, and what it does
on SIGTERM.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from signal import SIGINT, SIGTERM

from distlab.given.process_group import SIGKILL
from distlab.grading.kit.histories import Model, Row
from distlab.grading.kit.launcher_actions import Fact

FOREVER = math.inf
NUM_RANDOM, SIZES = 200, (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Life:
    """How a process ends when it is left alone, and after SIGTERM."""

    after_s: float = 10.0
    code: int = 0
    stops_in_s: float = 0.5  # FOREVER: it ignores SIGTERM
    stop_code: int = -SIGTERM


@dataclass(frozen=True, kw_only=True)
class Script:
    """A launcher's numbers, and the lives of its processes that are not the usual."""

    world_size: int = 3
    max_restarts: int = 2
    window_s: float = 100.0
    grace_s: float = 5.0
    lives: dict[tuple[int, int], Life] = field(default_factory=dict)
    interrupts: tuple[tuple[float, int], ...] = ()
    ticks_s: tuple[float, ...] = ()  # that came without having been asked for
    late_s: float = 0.0  # from the time of a WakeAt to its Tick


def _fails(code: int = 1, after_s: float = 2.0) -> Life:
    return Life(after_s, code)


def _failing(after_s: float, code: int) -> dict[tuple[int, int], Life]:
    """In each of eight generations rank 1 fails; ranks 0 and 2 live on."""
    lives = {(g, rank): Life(80.0) for g in range(1, 9) for rank in (0, 2)}
    return lives | {(g, 1): Life(after_s, code) for g in range(1, 9)}


IGNORES = Life(stops_in_s=FOREVER)
BY_HAND = (
    Script(),
    Script(world_size=1),
    Script(lives={(1, 0): Life(1.0), (1, 2): Life(20.0)}, ticks_s=(0.5, 12.0)),
    Script(lives={(1, 1): _fails()}),
    Script(lives={(1, 1): _fails(), (1, 0): Life(1.0)}),
    Script(lives={(1, 1): _fails(-SIGKILL), (1, 2): _fails(3, 2.2)}),
    Script(lives={(1, 1): _fails(), (1, 0): IGNORES}),
    Script(lives={(1, 1): _fails(), (1, 0): IGNORES}, ticks_s=(3.0, 4.0)),
    Script(lives={(1, 1): _fails(), (1, 0): Life(stops_in_s=1.0, stop_code=0)}),
    Script(lives={(1, 1): _fails(), (1, 0): IGNORES}, late_s=0.2),
    Script(lives={(1, 2): _fails()}, ticks_s=(7.3, 8.0)),  # those of the generation 1
    Script(lives={(g, 1): _fails(g + 2) for g in range(1, 7)}),
    Script(lives={(g, 1): _fails(-9) for g in range(1, 7)}),
    Script(max_restarts=0, lives={(1, 0): _fails(7)}),
    Script(max_restarts=0, lives={(1, 0): _fails(-11), (1, 1): _fails(5, 2.2)}),
    Script(
        max_restarts=0, lives={(1, 0): _fails(4), (1, 1): Life(stops_in_s=1.0)}
    ),
    Script(max_restarts=1, window_s=50.0, lives=_failing(60.0, 1)),
    Script(max_restarts=2, window_s=50.0, lives=_failing(15.0, 6)),
    *(  # the first restart is exactly 50 s ago, and a little less
        Script(
            world_size=1,
            max_restarts=1,
            window_s=50.0,
            lives={(1, 0): _fails(2), (2, 0): _fails(3, after_s)},
        )
        for after_s in (50.0, 49.875)
    ),
    Script(interrupts=((3.0, SIGINT),)),
    Script(interrupts=((3.0, SIGTERM),), lives={(1, 0): IGNORES, (1, 1): Life(1.0)}),
    Script(interrupts=((2.2, SIGINT),), lives={(1, 1): _fails()}),
    Script(world_size=1, max_restarts=1, lives={(1, 0): _fails(2), (2, 0): _fails(9)}),
    Script(world_size=11, max_restarts=0, lives={(1, 10): _fails(255)}),
    Script(
        world_size=1, max_restarts=11, lives={(g, 0): _fails(g) for g in range(1, 20)}
    ),
)  # fmt: skip


@lru_cache(maxsize=4)
def scripts(seed: int) -> tuple[Script, ...]:
    """Those above, and some that depend on the seed."""
    draw = random.Random(seed)
    return (*BY_HAND, *(_random_script(draw) for _ in range(NUM_RANDOM)))


def _random_script(draw: random.Random) -> Script:
    def tenths(least: float, most: float) -> float:
        return round(draw.uniform(least, most), 1) + draw.randint(1, 99) / 10_000

    world_size = draw.choice(SIZES)
    lives = {}
    for generation in range(1, 7):
        for rank in range(world_size):
            lives[generation, rank] = Life(
                after_s=tenths(0.1, 20.0),
                code=draw.choice((0, 0, 0, 1, 3, -9, -11)),
                stops_in_s=draw.choice((tenths(0.1, 1.0), tenths(1.0, 9.0), FOREVER)),
                stop_code=draw.choice((-SIGTERM, -SIGTERM, 0, 1)),
            )
    return Script(
        world_size=world_size,
        max_restarts=draw.randint(0, 3),
        window_s=tenths(5.0, 60.0),
        grace_s=tenths(1.0, 6.0),
        lives=lives,
        interrupts=tuple(
            (tenths(0.5, 40.0), SIGINT) for _ in range(draw.randint(0, 1))
        ),
        ticks_s=tuple(tenths(0.1, 30.0) for _ in range(draw.randint(0, 3))),
        late_s=draw.choice((0.0, tenths(0.1, 0.5))),
    )


class LaunchedProcesses:
    """The processes of a script: which events come, when, given the actions."""

    def __init__(self, script: Script) -> None:
        self.script, self.now_s = script, 0.0
        self.wake_at_s = self.tick_s = FOREVER  # as asked for, and when it will come
        self.ends: dict[int, tuple[float, Fact]] = {}  # by rank
        self.lives: dict[int, Life] = {}
        interrupts = [(at_s, ("interrupted", int(n))) for at_s, n in script.interrupts]
        ticks = [(at_s, ("tick",)) for at_s in script.ticks_s]
        self.others: list[tuple[float, Fact]] = sorted([*interrupts, *ticks])

    def events(self) -> Iterator[Fact]:
        """One after another, at `now_s`, while any comes."""
        yield ("begin",)
        while True:
            wake = (self.tick_s, ("wake",))
            coming = [*self.ends.values(), *self.others[:1], wake]
            at_s, event = min(coming, key=lambda one: one[0])
            if at_s == FOREVER:
                return
            self.now_s = max(self.now_s, at_s)
            if event == ("wake",):
                self.wake_at_s = self.tick_s = FOREVER
            elif event[0] == "ended":
                del self.ends[event[1]]
            else:
                self.others.pop(0)
            yield ("tick",) if event == ("wake",) else event

    def act(self, action: Fact) -> None:
        """Do what the launcher wants."""
        match action:
            case ("start", rank, generation):
                life = self.script.lives.get((generation, rank), Life())
                self.lives[rank] = life
                self.ends.pop(rank, None)
                self._end(rank, life.after_s, life.code)
            case ("signal", rank, number) if rank in self.ends:
                if number == SIGKILL:
                    self._end(rank, 0.01, -number)
                elif number == SIGTERM:
                    life = self.lives[rank]
                    self._end(rank, life.stops_in_s, life.stop_code)
            case ("wake", at_s):
                is_overdue = max(self.wake_at_s, at_s) <= self.now_s
                if not is_overdue:  # else the late Tick is the answer to both
                    self.tick_s = at_s + self.script.late_s
                self.wake_at_s = at_s
            case ("finish", _):
                self.ends.clear()
                self.others, self.wake_at_s, self.tick_s = [], FOREVER, FOREVER

    def _end(self, rank: int, in_s: float, code: int) -> None:
        end = self.now_s + in_s, ("ended", rank, int(code))
        self.ends[rank] = min(end, self.ends.get(rank, end), key=lambda one: one[0])


# ── what must come of a script ──────────────────────────────────────────────────────

_LATE_S = 0.1


class LauncherContract(Model):
    """A right launcher; when it asks for a Tick is left to the learner's."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.generation, self.cause = 0, 0
        self.alive: set[int] = set()
        self.kill_at_s = FOREVER
        self.last_kill_at_s = FOREVER  # stays known in the generations that follow
        self.was_interrupted = self.has_killed = self.is_late = False
        self.restarts_s: list[float] = []

    def offer(self, row: Row) -> list[Fact]:
        """The actions that are due, see `Model`; is_late: at `kill_at_s` already."""
        if self.alive and row.time_s > self.kill_at_s + self.script.late_s + _LATE_S:
            self.is_late = True
            return self._signals(SIGKILL)
        return self._on(tuple(row.request), row.time_s)

    def _on(self, event: Fact, now_s: float) -> list[Fact]:
        match event:
            case ("begin",):
                return self._all()
            case ("ended", rank, code):
                self.alive.discard(rank)
                signals = self._stop(code, now_s) if code else []
                return signals if self.alive else self._next(now_s)
            case ("interrupted", number):
                self.was_interrupted = True
                return self._stop(-number, now_s)
        if now_s >= self.kill_at_s:
            self.kill_at_s, self.has_killed = FOREVER, True
            return self._signals(SIGKILL)
        return []

    def _signals(self, number: int) -> list[Fact]:
        return [("signal", rank, int(number)) for rank in sorted(self.alive)]

    def _all(self) -> list[Fact]:
        self.generation, self.cause, self.kill_at_s = self.generation + 1, 0, FOREVER
        self.has_killed = False
        self.alive = set(range(self.script.world_size))
        return [("start", rank, self.generation) for rank in sorted(self.alive)]

    def _stop(self, code: int, now_s: float) -> list[Fact]:
        if self.cause:
            return []
        self.cause, self.kill_at_s = code, now_s + self.script.grace_s
        self.last_kill_at_s = self.kill_at_s
        return self._signals(SIGTERM)

    def _next(self, now_s: float) -> list[Fact]:
        recent = [t for t in self.restarts_s if t > now_s - self.script.window_s]
        is_over = self.was_interrupted or len(recent) >= self.script.max_restarts
        if not self.cause or is_over:
            return [("finish", self.cause if self.cause >= 0 else 128 - self.cause)]
        self.restarts_s.append(now_s)
        return self._all()

    def allows(self, actual: list[Fact], expected: list[Fact]) -> bool:
        """Whether these actions are as right as those of the contract."""
        if self.is_late or actual == expected:
            return not self.is_late
        if not expected and self.has_killed:  # another SIGKILL for the same ranks
            again = self._signals(SIGKILL)
            return all(action in again for action in actual)
        # A failure and an interruption at once: the code of either is right.
        codes = {128 + int(number) for _, number in self.script.interrupts}
        kinds = [action[0] for action in (*expected, *actual)]
        ends = self.was_interrupted and kinds == ["finish", "finish"]
        return ends and actual[0][1] in codes
