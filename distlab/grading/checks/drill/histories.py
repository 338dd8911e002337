"""Recorded runs for 4.12: renumbered, cut, and logged in other orders."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from distlab.curriculum import installed_course
from distlab.given import drill as given
from distlab.given.drill import Event, Incident, RecordedRun, Report, read_run

FOLDER = installed_course() / "phase4_production" / "incidents"
Change = Callable[[RecordedRun], RecordedRun]


@dataclass(frozen=True)
class Drill:
    """A run, what is special about it, and the right answer."""

    what: str
    run: RecordedRun
    expected: Incident


def recorded(name: str) -> tuple[RecordedRun, given.Cause]:
    """A recorded run, and what was injected into it."""
    path = FOLDER / f"{name}.json"
    injected = json.loads(path.read_text(encoding="utf-8"))["injected"]
    if injected["what"] in (given.NOTHING, "pause"):
        return read_run(path), given.Cause(given.NOTHING)
    return read_run(path), given.Cause(
        injected["what"], injected["rank"], injected["step"]
    )


# ── changes to a run ────────────────────────────────────────────────────────────────


def until(step: int) -> Change:
    """What was known when the last rank had completed `step`."""

    def change(run: RecordedRun) -> RecordedRun:
        reports = [report for report in run.reports if report.step <= step]
        end_s = reports[-1].time_s
        return RecordedRun(
            reports,
            [e for e in run.events if e.time_s <= end_s and e.kind != given.ENTERED],
        )

    return change


def ended_by(signal: str) -> Change:
    """The process ended by another signal than SIGKILL."""

    def change(run: RecordedRun) -> RecordedRun:
        events = [
            e._replace(text=signal) if e.text == "SIGKILL" else e for e in run.events
        ]
        return RecordedRun(run.reports, events)

    return change


def without(rank: int) -> Change:
    """A run that this rank isn't part of."""

    def change(run: RecordedRun) -> RecordedRun:
        reports = [report for report in run.reports if report.rank != rank]
        return RecordedRun(reports, [e for e in run.events if e.rank != rank])

    return change


def seen_late(run: RecordedRun) -> RecordedRun:
    """The agent looks at the killed process last."""
    cause = [e for e in run.events if e.kind == given.ENDED and e.text[:3] == "SIG"]
    rest = [event for event in run.events if event not in cause]
    end_s = rest[-1].time_s
    late = [event._replace(time_s=end_s + 0.05) for event in cause]
    return RecordedRun(run.reports, rest + late)


def refused(rank: int, step: int) -> Change:
    """A checkpoint turns out to be torn, too."""

    def change(run: RecordedRun) -> RecordedRun:
        event = Event(run.events[-1].time_s + 0.1, given.REFUSED, rank, step, "torn")
        return RecordedRun(run.reports, [*run.events, event])

    return change


def refused_first(rank: int, step: int) -> Change:
    """A checkpoint turns out to be torn before the others do."""

    def change(run: RecordedRun) -> RecordedRun:
        kinds = [event.kind for event in run.events]
        place = kinds.index(given.REFUSED)
        event = run.events[place]._replace(rank=rank, step=step, text="torn")
        events = [*run.events[:place], event, *run.events[place:]]
        return RecordedRun(run.reports, events)

    return change


def saved(step: int) -> Change:
    """A checkpoint was written after this step, too."""

    def change(run: RecordedRun) -> RecordedRun:
        end_s = max(r.time_s for r in run.reports if r.step == step)
        events = [*run.events, Event(end_s, given.SAVED, step=step)]
        return RecordedRun(run.reports, sorted(events))

    return change


def unsaved(run: RecordedRun) -> RecordedRun:
    """A run that saves no checkpoint; the agent's log begins with its failure."""
    kinds = (given.SAVED, given.ENTERED)
    return RecordedRun(run.reports, [e for e in run.events if e.kind not in kinds])


def since(step: int) -> Change:
    """A run that was resumed, and began with `step`."""
    return lambda run: RecordedRun(
        [r for r in run.reports if r.step >= step], run.events
    )


def in_order(*ranks: int) -> Change:
    """In each step these ranks report in this order, which is that of their lines."""

    def change(run: RecordedRun) -> RecordedRun:
        by_step: dict[int, list[Report]] = {}
        for report in run.reports:
            by_step.setdefault(report.step, []).append(report)
        reports = []
        for own in by_step.values():
            times = sorted(report.time_s for report in own)
            own.sort(key=lambda report: ranks.index(report.rank))
            reports += [
                report._replace(time_s=time_s)
                for report, time_s in zip(own, times, strict=True)
            ]
        return RecordedRun(reports, run.events)

    return change


def other_checksums(run: RecordedRun) -> RecordedRun:
    """Each checksum becomes another one: high ones low."""
    reports = [r._replace(checksum=2**32 - 1 - r.checksum) for r in run.reports]
    return RecordedRun(reports, run.events)


def own_times(first: int, *seconds: float) -> Change:
    """From step `first` on, ranks 0 to 3 compute for so long."""

    def change(run: RecordedRun) -> RecordedRun:
        reports = [
            report._replace(own_s=seconds[report.rank])
            if report.step >= first
            else report
            for report in run.reports
        ]
        return RecordedRun(reports, run.events)

    return change


def nan_from(rank: int, step: int) -> Change:
    """A nan in this rank's gradients; after the all_reduce all ranks have it."""

    def changed(report: Report) -> Report:
        if report.step < step:
            return report
        report = report._replace(checksum=2**31 - 1)
        if report.step > step:
            return report._replace(num_nonfinite=12, loss=float("nan"))
        return report._replace(num_nonfinite=12 if report.rank == rank else 0)

    return lambda run: RecordedRun(list(map(changed, run.reports)), run.events)


def differs_from(rank: int, step: int) -> Change:
    """From this step on a bit of this rank's weights is another one."""

    def changed(report: Report) -> Report:
        is_it = report.rank == rank and report.step >= step
        return report._replace(checksum=report.checksum ^ 1) if is_it else report

    return lambda run: RecordedRun(list(map(changed, run.reports)), run.events)


def killed_in(rank: int, step: int) -> Change:
    """In this step a rank is killed; the others time out."""

    def change(run: RecordedRun) -> RecordedRun:
        run = until(step - 1)(run)
        end_s, events = run.reports[-1].time_s, list(run.events)
        others = {report.rank for report in run.reports} - {rank}
        events.append(Event(end_s + 0.5, given.ENDED, rank, -1, "SIGKILL"))
        for other in others:
            events.append(Event(end_s + 4, given.LOST, other, step, "timed out"))
            events.append(Event(end_s + 5, given.ENDED, other, -1, "exit code 1"))
        return RecordedRun(run.reports, sorted(events))

    return change


def ahead(rank: int) -> Change:
    """One rank has completed one more step than the others."""

    def change(run: RecordedRun) -> RecordedRun:
        last = next(r for r in reversed(run.reports) if r.rank == rank)
        more = last._replace(step=last.step + 1, time_s=run.reports[-1].time_s + 0.1)
        waits = (given.ENTERED, given.LOST)
        events = [
            e._replace(step=more.step + 1) if e.rank == rank and e.kind in waits else e
            for e in run.events
        ]
        return RecordedRun([*run.reports, more], events)

    return change


def first_lost(run: RecordedRun) -> RecordedRun:
    """What was known when the first rank had timed out."""
    kinds = [event.kind for event in run.events]
    return RecordedRun(run.reports, run.events[: kinds.index(given.LOST) + 1])


def renumbered(drill: Drill, draw: random.Random) -> Drill:
    """The same run with other ranks, and as a part of a longer one."""
    ranks = {report.rank for report in drill.run.reports}
    numbers = draw.sample(range(64), len(ranks))
    names = dict(zip(sorted(ranks), numbers, strict=True)) | {-1: -1}
    if drill.what in _PLACES:
        own = drill.expected.rank
        wanted = sorted(numbers)[_PLACES[drill.what]]
        other = next(rank for rank, number in names.items() if number == wanted)
        names[own], names[other] = wanted, names[own]
    shift = draw.choice((0, 40, 700))

    def moved(step: int) -> int:
        return step if step < 0 else step + shift

    reports = [
        report._replace(rank=names[report.rank], step=moved(report.step))
        for report in drill.run.reports
    ]
    events = [
        event._replace(
            rank=names[event.rank],
            step=moved(event.step),
            text=_text(event, names[event.rank], moved(event.step)),
        )
        for event in drill.run.events
    ]
    right = drill.expected
    # Without a usable checkpoint everything is lost, also what came before.
    lost = right.steps_lost
    is_all = lost == max(report.step for report in drill.run.reports) and lost > 0
    expected = right._replace(
        rank=names[right.rank],
        step=moved(right.step),
        steps_lost=lost + shift if is_all else lost,
    )
    return replace(drill, run=RecordedRun(reports, events), expected=expected)


def _text(event: Event, rank: int, step: int) -> str:
    """The text of an event, with the new numbers."""
    old = f"step_{event.step}_rank_{event.rank}"
    return event.text.replace(old, f"step_{step}_rank_{rank}")


# ── the drills ──────────────────────────────────────────────────────────────────────

_K, _W, _F = "killed", "data_worker", "frozen"
_LAST = "the last rank is stopped and one of the others has timed out"
_FIRST = "the first rank is stopped and one of the others has timed out"
_JUST = "a rank's own time is 1.05 s and the others' median is 0.5 s"
_TWICE = "a rank's own time is 1 s, exactly twice the others' median"
_EVEN = "one of three ranks has 2.125 s of own time and the others' median is 1 s"
_NOT_EVEN = "one of three ranks has 1.75 s of own time and the others' median is 1 s"
_AHEAD = "a rank is killed that is one step ahead of the others"
_FIRST_LINE = "the rank that reports first is the only one with another checksum"
_SLOW = own_times(5, 0.5, 0.1, 0.1, 0.1)
_PLACES = {_LAST: -1, _FIRST: 0}
LISTS: dict[str, Sequence[tuple[str, str, int, Sequence[Change]]]] = {
    "C1": (
        ("a rank gets a nan in the middle of a run", "nan", 15, ()),
        ("a rank gets a nan in the newest step", "nan", 3, (until(8),)),
        (
            "a rank gets a nan and a checkpoint of that very step is saved",
            "nan",
            15,
            (saved(8),),
        ),
        ("a weight of one rank differs", "desync", 15, ()),
        ("a weight of one rank differs in the newest step", "desync", 2, (until(7),)),
        (
            "a rank gets a nan in a run's first step",
            "nan",
            15,
            (since(8), in_order(1, 0, 2, 3)),
        ),
        ("the rank that reports last gets a nan", "nan", 15, (in_order(0, 2, 3, 1),)),
        (_FIRST_LINE, "desync", 15, (other_checksums, in_order(2, 0, 1, 3))),
        (
            "a weight of one rank differs and a nan comes later",
            "desync",
            15,
            (nan_from(1, 9),),
        ),
        (
            "a rank gets a nan and a weight differs later",
            "nan",
            15,
            (differs_from(3, 10),),
        ),
        (
            "a rank gets a nan and a weight differs in the same step",
            "nan",
            15,
            (differs_from(0, 8),),
        ),
        (
            "a weight of one rank differs and a rank is killed later",
            "desync",
            7,
            (killed_in(0, 13),),
        ),
        (
            "a rank gets a nan and another is killed later",
            "nan",
            6,
            (killed_in(3, 12),),
        ),
    ),
    "C2": (
        ("a rank is killed", _K, 2, ()),
        ("a rank is killed but the agent sees others fail first", _K, 2, (seen_late,)),
        (
            "one rank is killed but the agent sees others fail first",
            "killed_rank_0",
            0,
            (seen_late,),
        ),
        ("a data worker is killed", _W, 3, ()),
        ("a rank ends by SIGSEGV", _K, 2, (ended_by("SIGSEGV"),)),
        (
            "a rank ends by SIGBUS but the agent sees others fail first",
            _K,
            2,
            (seen_late, ended_by("SIGBUS")),
        ),
        ("a rank ends by SIGTERM", "killed_rank_0", 0, (ended_by("SIGTERM"),)),
        ("a rank is killed and another has completed the step", _K, 2, (ahead(0),)),
        (
            "a data worker is killed and another rank is a step ahead",
            _W,
            3,
            (ahead(1),),
        ),
        (_AHEAD, _K, 2, (ahead(2),)),
    ),
    "C3": (
        ("a rank is stopped", _F, 1, ()),
        (_LAST, _F, 1, (first_lost,)),
        (_FIRST, _F, 1, (first_lost,)),
    ),
    "C4": (
        ("a rank is slow and stays slow", "slow", 0, ()),
        ("a rank is late in the last 5 steps", "slow", 0, (until(13),)),
        (
            "a rank is late since a run's first step",
            "slow",
            0,
            (since(9), in_order(0, 1, 2, 3)),
        ),
        (
            "a rank was late, but not in the newest step",
            "slow",
            0,
            (own_times(20, 0.1, 0.1, 0.1, 0.1),),
        ),
        (_JUST, "slow", 0, (own_times(9, 0.5, 0.5, 0.95, 1.05),)),
        (_EVEN, "slow", 0, (without(0), own_times(9, 0, 0.25, 1.75, 2.125))),
        (_NOT_EVEN, "slow", 0, (without(0), own_times(9, 0, 0.25, 1.75, 1.75))),
        (_TWICE, "slow", 0, (own_times(9, 0.5, 0.5, 0.5, 1.0),)),
        ("a rank is late in only 4 steps so far", "slow", 0, (until(12),)),
        ("a rank pauses in one step", "pause", 0, ()),
        ("a rank paused a moment ago", "pause", 0, (until(9),)),
        ("nothing is wrong", "healthy", 0, ()),
        ("a rank is slow and another is killed", _K, 2, (_SLOW,)),
        ("a rank is slow and a weight differs", "desync", 15, (_SLOW,)),
    ),
    "C5": (
        ("a rank is killed and there is no checkpoint", _K, 12, (unsaved,)),
        (
            "a rank is killed and the newest checkpoint is torn",
            "killed_and_torn",
            6,
            (),
        ),
        ("a run stops on request and its newest checkpoint is torn", "torn", 7, ()),
        (
            "a rank gets a nan and the checkpoint before it is torn",
            "nan",
            20,
            (refused(2, 5),),
        ),
        ("a rank is slow and a checkpoint is torn", "torn", 7, (_SLOW,)),
        ("two checkpoints are torn", "torn", 12, (refused(1, 10),)),
        (
            "three checkpoints are torn and the newest is second in the log",
            "torn",
            17,
            (refused_first(1, 10), refused(2, 5)),
        ),
        ("a rank is frozen and a checkpoint is torn", _F, 6, (refused(0, 10),)),
    ),
}
"""By clause: what it is, the recorded run, the steps lost, and changes to the run."""
_NOT_SLOW = {
    "a rank is late in only 4 steps so far",
    "a rank was late, but not in the newest step",
    _TWICE,
    _NOT_EVEN,
}


@cache
def drills(seed: int) -> dict[str, list[Drill]]:
    """The drills of each clause; numbers of ranks and steps are drawn."""
    draw = random.Random(seed)
    return {
        name: [renumbered(_drill(*row), draw) for row in rows]
        for name, rows in LISTS.items()
    }


def _drill(what: str, name: str, lost: int, changes: Sequence[Change]) -> Drill:
    run, cause = recorded(name)
    for change in changes:
        run = change(run)
    if what in _NOT_SLOW:
        cause = given.Cause(given.NOTHING)
    if what == _AHEAD:
        cause = cause._replace(step=cause.step + 1)
    return Drill(what, run, Incident(*cause, given.ACTIONS[cause.what], lost))


def lines_of(drill: Drill, count: int = 8) -> list[tuple[int, str, str]]:
    """(rank, kind, text) of the events that matter, in the order of the log."""
    kinds = (given.SAVED, given.ENTERED)
    events = [event for event in drill.run.events if event.kind not in kinds]
    shown = [
        (e.rank, e.kind, "  ".join([f"step {e.step}"] * (e.step >= 0) + [e.text]))
        for e in events
    ]
    return shown[:count] or [_line(report) for report in drill.run.reports[-count:]]


def _line(report: Report) -> tuple[int, str, str]:
    bad = f"  {report.num_nonfinite} nonfinite" if report.num_nonfinite else ""
    text = f"own {report.own_s:.2f} s  checksum {report.checksum}{bad}"
    return report.rank, f"step {report.step}", text
