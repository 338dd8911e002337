"""Reports for 4.6: those of recorded runs, and drawn ones, with the right answers.

The contract is worked out here once more. A case is kept only if its seconds lie far
from each limit, so that a rounding error decides nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import lru_cache
from statistics import median
from typing import Any, NamedTuple

from distlab.given.recovery import (
    COMPUTE,
    NEWEST,
    RUNS,
    SAVE,
    WAIT,
    RecordedRun,
    Step,
)
from distlab.given.recovery import Report as Row

SLOW, LEAST, PATIENCE = 2.0, 5, 10.0
_MARGIN = 0.08
Ranks = tuple[list[int], list[int], list[int]]
"""The ranks that are dead, frozen and slow."""


class ReportsCase(NamedTuple):
    """Reports, in any order, and when they are looked at."""

    what: str
    rows: list[Row]
    now_s: float
    patience: float = PATIENCE


def usual(rows: Sequence[Row]) -> float:
    """Median and jitter of the steps; inf if there are too few."""
    steps = [pair for row in rows for pair in zip(row.steps, row.steps[1:])]  # noqa: B905
    seconds = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in steps]
    if len(seconds) < LEAST:
        return math.inf
    middle = median(seconds)
    return middle + median([abs(one - middle) for one in seconds])


def idle(row: Row, now_s: float) -> float:
    """Seconds without a sign of progress."""
    return now_s - max([row.since_s, *(step.time_s for step in row.steps[-1:])])


def right(case: ReportsCase) -> Ranks:
    """The contract."""
    usual_s, now_s = usual(case.rows), case.now_s
    limit_s = case.patience * usual_s
    dead = [row for row in case.rows if row.has_ended]
    rest = [row for row in case.rows if row.steps and not row.has_ended]
    frozen = [
        row
        for row in rest
        if idle(row, now_s) > limit_s
        and (row.doing == COMPUTE or now_s - row.beat_s > limit_s)
    ]
    slow = [
        row
        for row in rest
        if row.doing == COMPUTE and SLOW * usual_s < idle(row, now_s) <= limit_s
    ]
    return ranks_of(dead), ranks_of(frozen), ranks_of(slow)


def ranks_of(rows: Sequence[Row]) -> list[int]:
    """In ascending order."""
    return sorted(row.rank for row in rows)


def _is_sure(case: ReportsCase) -> bool:
    """Whether no seconds lie near a limit."""
    usual_s = usual(case.rows)
    if usual_s == math.inf:
        return True
    limits = SLOW * usual_s, case.patience * usual_s
    seconds = [idle(row, case.now_s) for row in case.rows]
    seconds += [case.now_s - row.beat_s for row in case.rows]
    return all(abs(s - limit) > _MARGIN * limit for s in seconds for limit in limits)


_TITLES = {
    "hang": "rank 0 hangs but sends heartbeats",
    "killed": "rank 0 gets SIGKILL",
    "replaced": "rank 1's new process takes long for its first step",
    "saves": "rank 0 saves for long and the others wait",
    "slow": "rank 2 computes eight times as long",
    "stopped": "rank 1 gets SIGSTOP while it computes",
    "stopped_waiting": "rank 2 gets SIGSTOP while it waits",
}
"""The recorded runs, by the names of their files."""

# ── recorded ────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=1)
def recorded() -> tuple[ReportsCase, ...]:
    """Each recorded run, at times before and after what happened."""
    cases = []
    for path in sorted(RUNS.glob("*.json")):
        run = RecordedRun.read(path)
        fault_s, *_ = run.faults[0]
        end_s, usual_s = run.messages[-1][0], usual(run.reports(fault_s))
        times = [fault_s + steps * usual_s for steps in (-2, 1.2, 4, 8, 13, math.inf)]
        for now_s in [*times, _longest(run) - 1e-3]:
            now_s = min(now_s, end_s)
            rows = run.reports(now_s)
            title = f"{now_s:.3g} s into a recorded run in which {_TITLES[path.stem]}"
            cases.append(ReportsCase(title, rows, now_s))
    return tuple(filter(_is_sure, cases))


def _longest(run: RecordedRun) -> float:
    """The end of the longest computation, without the first one of a process."""
    last: dict[int, tuple[str, float]] = {}
    found = 0.0, 0.0
    for time_s, rank, what, _ in run.messages:
        if what == "step" or (what in (WAIT, SAVE) and rank in last):
            before, since_s = last.get(rank, ("", time_s))
            if before == COMPUTE:
                found = max(found, (time_s - since_s, time_s))
        if what in (COMPUTE, WAIT, SAVE):
            last[rank] = what, time_s
        elif what == "started":
            last.pop(rank, None)
    return found[1]


# ── drawn ───────────────────────────────────────────────────────────────────────────

Doing = tuple[str, float, float]
"""What a rank does, how long it has been idle, and silent, in usual steps."""
FINE: Doing = (WAIT, 0.3, 0.1)


def _case(
    draw: random.Random,
    what: str,
    doing: Sequence[Doing],
    *,
    num_steps: int = 12,
    jitter: float = 0.05,
    lost: int = 0,
    new: int = -1,
    one: int = -1,
    ended: Sequence[int] = (),
    since_start: bool = False,
    patience: float = PATIENCE,
) -> ReportsCase:
    """One rank for each of `doing`; its times are scaled by 1e-3 … 1e2."""
    scale, ranks = 10 ** draw.uniform(-3, 2), draw.sample(range(1, 200), len(doing))
    first, start_s = draw.randint(0, 5000), draw.uniform(0, 5000) * scale
    times = [start_s]
    for _ in range(num_steps):
        seconds = 1 + jitter * draw.choice((-1, 1)) * draw.uniform(0.5, 1)
        times.append(times[-1] + scale * seconds)
    steps = [Step(first + k, time_s) for k, time_s in enumerate(times)]
    usual_s = usual([Row(0, steps, WAIT, 0.0, 0.0)] * 5)
    usual_s = usual_s if usual_s < math.inf else scale
    now_s = times[-1] + usual_s * max(idle for _, idle, _ in doing)
    rows = []
    for place, (what_rank, idle_s, silent_s) in enumerate(doing):
        own = list(steps)
        for _ in range(lost):
            del own[draw.randrange(1, len(own) - 1)]
        since_s = start_s if since_start else now_s - idle_s * usual_s
        own = own[-1:] if place == one else own[-NEWEST:]
        own = [] if place == new else own
        beat_s = now_s - silent_s * usual_s
        is_over = place in ended
        rows.append(Row(ranks[place], own, what_rank, since_s, beat_s, is_over))
    return ReportsCase(what, draw.sample(rows, len(rows)), now_s, patience)


@lru_cache(maxsize=4)
def cases(seed: int) -> tuple[ReportsCase, ...]:
    """The recorded ones, and some that depend on the seed."""
    draw = random.Random(seed)
    waits: Doing = (WAIT, 30.0, 0.1)
    short: Doing = (WAIT, 6.0, 0.1)

    def case(what: str, *doing: Doing, **how: Any) -> ReportsCase:
        return _case(draw, what, doing, **how)

    drawn = [
        case("all is well", FINE, (COMPUTE, 0.5, 0.1), FINE),
        case("a rank hangs, its heartbeat goes on", waits, (COMPUTE, 30.0, 0.1), waits),
        case("a rank is stopped", waits, (COMPUTE, 30.0, 30.0), waits, waits),
        case("two ranks hang", (COMPUTE, 31, 0.1), waits, (COMPUTE, 30, 0.2), waits),
        case("one rank hangs, one is stopped in WAIT", (COMPUTE, 30, 0.1), waits,
             (WAIT, 29.0, 29.0)),
        case("all ranks wait for one another", waits, waits, waits),
        case("a straggler", short, (COMPUTE, 6.0, 0.1), short),
        case("a straggler, its heartbeat is late too", short, (COMPUTE, 6.0, 6.0)),
        case("one rank computes for a little longer", FINE, (COMPUTE, 1.6, 0.1), FINE),
        case("a heartbeat is late, steps go on", FINE, (COMPUTE, 0.4, 40.0), FINE),
        case("no heartbeat comes, steps go on", (WAIT, 0.3, 50.0), (WAIT, 0.2, 60.0)),
        case("a rank saves for a long time", (SAVE, 60.0, 0.1), (WAIT, 59.0, 0.2)),
        case("a rank saves, the heartbeat of another is a little late",
             (SAVE, 60.0, 0.1), (WAIT, 59.0, 5.0)),
        case("a rank is stopped while it saves", (SAVE, 60.0, 60.0), (WAIT, 59.0, 0.2)),
        case("it has just begun to save, and is silent", (SAVE, 1.2, 30), FINE, FINE),
        case("a new process in its first step", waits, (COMPUTE, 30.0, 0.1), waits,
             new=1),
        case("a new process in its first step, without a heartbeat", waits, waits,
             (COMPUTE, 30.0, 30.0), new=2),
        case("a new process in its first step, not yet long", short, waits,
             (COMPUTE, 6.0, 6.0), new=2),
        case("a new process, and another rank hangs", (COMPUTE, 30.0, 0.1),
             (WAIT, 29.0, 0.1), waits, new=1),
        case("a new process hangs in its second step", waits, (COMPUTE, 30.0, 0.1),
             waits, one=1),
        case("the first steps of a run", (COMPUTE, 300.0, 0.1), waits, num_steps=1),
        case("a process has ended", waits, (COMPUTE, 30.0, 30.0), waits, ended=[1]),
        case("a process has ended just now", FINE, (COMPUTE, 0.5, 0.5), ended=[1]),
        case("a process has ended, a rank is late", (COMPUTE, 5.0, 0.1), waits, short,
             ended=[1]),
        case("one process has ended, one hangs", waits, (COMPUTE, 30.0, 30.0),
             (COMPUTE, 31.0, 0.1), ended=[1]),
        case("a new process has ended", FINE, (COMPUTE, 3.0, 3.0), ended=[1], new=1),
        case("one rank, which never waits", (COMPUTE, 0.6, 0.1), since_start=True,
             num_steps=40),
        case("one rank hangs", (COMPUTE, 25.0, 0.1), since_start=True),
        case("just enough steps", (COMPUTE, 25.0, 0.1), num_steps=LEAST),
        case("jitter", short, (COMPUTE, 8.5, 0.1), short, jitter=0.6),
        case("a hang with jitter", waits, (COMPUTE, 30.0, 0.1), waits, jitter=0.6),
        case("reports lack steps", short, (COMPUTE, 5.0, 0.1), short, lost=6),
        case("a hang, and reports lack steps", waits, (COMPUTE, 14.0, 0.1), lost=6),
        case("patience 3", short, (COMPUTE, 5.0, 0.1), (WAIT, 5, 5), patience=3.0),
        case("patience 40", waits, (COMPUTE, 30.0, 0.1), (WAIT, 28, 28), patience=40.0),
    ]  # fmt: skip
    return (*recorded(), *filter(_is_sure, drawn), *_AT_LIMITS)


def _exact(what: str, *doing: Doing, num_steps: int = 8) -> ReportsCase:
    """Steps of 1 s without jitter, up to 100 s: all limits are whole seconds."""
    steps = [Step(98 + k, 100.0 - num_steps + k) for k in range(num_steps + 1)]
    rows = [
        Row(rank, steps, what_rank, 128.0 - idle_s, 128.0 - silent_s, False)
        for rank, (what_rank, idle_s, silent_s) in enumerate(doing, 9)
    ]
    return ReportsCase(what, rows[::-1], 128.0)


_AT_LIMITS = (
    _exact("idle for exactly 2 and for 2.25 usual steps", (COMPUTE, 2.0, 0.0),
           (COMPUTE, 2.25, 0.0)),
    _exact("idle for exactly 10 and for 10.25 usual steps", (COMPUTE, 10.0, 0.0),
           (COMPUTE, 10.25, 0.0)),
    _exact("waiting ranks are silent for 10 and for 10.25 usual steps",
           (WAIT, 20.0, 10.0), (WAIT, 20.0, 10.25), (WAIT, 10.0, 20.0),
           (WAIT, 10.25, 20.0)),
    _exact("saving ranks are silent for 10 and for 10.25 usual steps",
           (SAVE, 20.0, 10.0), (SAVE, 20.0, 10.25)),
    _exact("one duration fewer than LEAST", (COMPUTE, 25.0, 0.0),
           num_steps=LEAST - 1),
    _exact("exactly LEAST durations", (COMPUTE, 25.0, 0.0), num_steps=LEAST),
)  # fmt: skip
