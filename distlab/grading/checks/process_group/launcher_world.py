"""The processes of a script of 3.18, in virtual time, at the learner's launcher.

The contract sees the same events; where its actions differ is what judges speak of.
"""

from __future__ import annotations

import heapq
from itertools import count
from signal import SIGKILL, SIGTERM
from types import ModuleType
from typing import Any

from distlab.grading.checks.process_group.launcher_contract import (
    Fact,
    Row,
    first_difference,
)
from distlab.grading.checks.process_group.lives import FOREVER, Life, Script, scripts
from distlab.grading.kit.plans import in_call
from distlab.runner import RankContext

_MOST_EVENTS = 400


class World:
    """The processes of a script: which events come, when, given the actions."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.now_s = 0.0
        self.finished = False
        self.alive: dict[int, tuple[int, Life]] = {}  # by rank: its start, its life
        self.num_starts = 0
        self.wake_at_s = FOREVER
        self.numbers = count()
        self.queue: list[tuple[float, int, Fact]] = []
        self.put(0.0, ("begin",))
        for at_s, number in script.interrupts:
            self.put(at_s, ("interrupted", int(number)))
        for at_s in script.ticks_s:
            self.put(at_s, ("tick",))

    def put(self, at_s: float, event: Fact) -> None:
        """Have this event at this time."""
        if at_s < FOREVER:
            heapq.heappush(self.queue, (at_s, next(self.numbers), event))

    def next_event(self) -> Fact | None:
        """The next event that comes to pass; None: nothing happens any more."""
        while self.queue and not self.finished:
            self.now_s, _, event = heapq.heappop(self.queue)
            if event[0] == "ended":
                _, rank, code, start = event
                if rank not in self.alive or self.alive[rank][0] != start:
                    continue  # it had ended before
                del self.alive[rank]
                return "ended", rank, code
            if event[0] == "wake":
                if event[1] != self.wake_at_s:
                    continue  # another one replaced it
                self.wake_at_s = FOREVER
                return ("tick",)
            return event
        return None

    def act(self, action: Fact) -> None:
        """Do what the launcher wants."""
        match action:
            case ("start", rank, generation):
                self.num_starts += 1
                life = self.script.lives.get((generation, rank), Life())
                self.alive[rank] = self.num_starts, life
                self.put(
                    self.now_s + life.after_s,
                    ("ended", rank, life.code, self.num_starts),
                )
            case ("signal", rank, number) if rank in self.alive:
                start, life = self.alive[rank]
                if number == SIGKILL:
                    self.put(self.now_s + 0.01, ("ended", rank, -number, start))
                elif number == SIGTERM:
                    at_s = self.now_s + life.stops_in_s
                    self.put(at_s, ("ended", rank, life.stop_code, start))
            case ("wake", at_s):
                self.wake_at_s = max(at_s, self.now_s)
                self.put(self.wake_at_s, ("wake", self.wake_at_s))
            case ("finish", _):
                self.finished = True


def play(unit: ModuleType, script: Script) -> list[Row]:
    """The events of a script with the launcher's actions."""
    launcher = unit.Launcher(
        script.world_size,
        max_restarts=script.max_restarts,
        window_s=script.window_s,
        grace_s=script.grace_s,
    )
    world = World(script)
    rows: list[Row] = []
    while len(rows) < _MOST_EVENTS and (event := world.next_event()):
        happened = _event(unit, event)
        with in_call(f"on({happened}, {world.now_s:.4g})"):
            given = launcher.on(happened, world.now_s)
        if isinstance(given, list | tuple):
            actions = tuple(_read(unit, action) for action in given)
        else:
            actions = (("unknown", f"{given!r:.60}"),)
        for action in actions:
            world.act(action)
        rows.append((world.now_s, event, actions))
        if any(action[0] == "unknown" for action in actions):
            break
    return rows


def _event(unit: ModuleType, event: Fact) -> Any:
    kinds = {
        "begin": unit.Begin,
        "ended": unit.Ended,
        "interrupted": unit.Interrupted,
        "tick": unit.Tick,
    }
    return kinds[event[0]](*event[1:])


def _read(unit: ModuleType, action: Any) -> Fact:
    match action:
        case unit.Start(rank, generation):
            return "start", int(rank), int(generation)
        case unit.Signal(rank, number):
            return "signal", int(rank), int(number)
        case unit.WakeAt(at_s):
            return "wake", float(at_s)
        case unit.Finish(code):
            return "finish", int(code)
    return "unknown", f"{action!r:.60}"


def play_lives(
    context: RankContext, unit: ModuleType, seed: int
) -> list[tuple[int, list[Row]]]:
    """The first script of each clause with a wrong action: its number, its rows."""
    records, seen = [], set()
    for number, script in enumerate(scripts(seed)):
        rows = play(unit, script)
        difference = first_difference(script, rows)
        if difference and difference.clause not in seen:
            seen.add(difference.clause)
            records.append((number, rows))
    return records
