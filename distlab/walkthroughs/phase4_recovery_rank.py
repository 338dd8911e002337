"""Run the learner's `recovery` in one rank for the lab of phase 4."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from distlab.given.recovery import RecordedRun
from distlab.grading.checks.recovery.faults import Life, Script
from distlab.grading.checks.recovery.supervise import play_supervisor
from distlab.runner import RankContext

Bar = tuple[int, float, float, str, int]
"""A process from one time to another, with its role and generation then."""
MOMENTS = 400


def conditions(
    context: RankContext, unit: ModuleType, *, seed: int = 0, run: str
) -> list[tuple[float, list[list[int]]]]:
    """Return each change in the lists of detect for a recorded run."""
    recorded = RecordedRun.read(run)
    end_s = recorded.messages[-1][0]
    last: list[list[int]] = [[], [], []]
    changes: list[tuple[float, list[list[int]]]] = []
    for now_s in (end_s * k / MOMENTS for k in range(MOMENTS + 1)):
        told = unit.detect(recorded.reports(now_s), now_s)
        lists = [list(told.dead), list(told.frozen), list(told.slow)]
        if lists != last:
            changes.append((now_s, lists))
            last = lists
    return changes


def supervised(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    num_ranks: int,
    num_standbys: int,
    deaths: tuple[tuple[int, float], ...],
) -> list[Bar]:
    """Return the processes of a script in which some die after their start."""
    lives = {process: Life(after_s=after_s) for process, after_s in deaths}
    script = Script(
        world_size=num_ranks, num_standbys=num_standbys, lives=lives, num_steps=12
    )
    bars: list[Bar] = []
    now: dict[int, tuple[float, str, int]] = {}

    def change(process: int, time_s: float, what: str, generation: int = 0) -> None:
        if process in now:
            since_s, before, of = now.pop(process)
            bars.append((process, since_s, time_s, before, of))
        if what:
            now[process] = time_s, what, generation

    for row in play_supervisor(unit, script):
        kind, *values = row[2]
        if kind == "ready":
            change(values[0], row[0], "standby")
        elif kind == "ended":
            change(values[0], row[0], "")
        for action in row[3]:
            _act(action, row[0], change)
    return sorted(bars)


def _act(action: Any, time_s: float, change: Any) -> None:
    match action:
        case ("start", process):
            change(process, time_s, "imports")
        case ("form", generation, members):
            for rank, process in members:
                change(process, time_s, f"rank {rank}", generation)
