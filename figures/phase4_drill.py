"""A recorded run as a timeline; `python -m figures.phase4_drill` draws it.

Times, events and the answer are those of `incidents/killed.json` and the reference.
"""

from __future__ import annotations

from pathlib import Path

from distlab.curriculum import load
from distlab.given.drill import ENDED, ENTERED, LOST, SAVED, RecordedRun, read_run
from distlab.trace.palette import (
    CALL,
    COMPLETE,
    FAILURE,
    FAILURE_TEXT,
    FORWARD,
    GRID,
    INK,
    MUTED,
)
from figures.draw import Canvas, write

PHASE = Path(__file__).resolve().parent.parent / "phase4_production"
FOLDER = PHASE / "figures"
FROM_S, TO_S = 2.6, 8.5
LEFT, PER_S, TOP, LANE, TALL = 84.0, 110.0, 64.0, 54.0, 28.0


def _x(time_s: float) -> float:
    return LEFT + PER_S * (max(FROM_S, time_s) - FROM_S)


def timeline() -> str:
    """Steps of four ranks, the kill, and everything that it led to."""
    run = read_run(PHASE / "incidents" / "killed.json")
    answer = load("drill").incident(run.reports, run.events)
    last = min(
        max(row.step for row in run.reports if row.rank == rank) for rank in range(4)
    )
    c = Canvas(
        "drill-timeline",
        760,
        390,
        title="A recorded run: one rank is killed, and three others report errors",
        desc=(
            "Time runs to the right, from 2.6 to 8.5 seconds. Four ranks compute and "
            f"communicate until step {last}, and checkpoint 10 is saved. Then rank 2 "
            "has SIGKILL, seen at 4.2 s. Ranks 0, 1 and 3 wait in the all-reduce of "
            "step 13 until their timeouts, about four seconds later, and end with "
            f"exit code 1. The answer: {answer.what}, rank {answer.rank}, step "
            f"{answer.step}, {answer.steps_lost} steps lost."
        ),
    )
    bottom = TOP + 4 * LANE - 14
    for second in range(3, 9):
        x = _x(second)
        c.line(x, TOP - 4, x, bottom, color=GRID, thick=1)
        c.text(x, bottom + 16, f"{second} s", size=11.5, color=MUTED)
    saved = next(e.time_s for e in run.events if e.kind == SAVED and e.step == 10)
    x = _x(saved)
    c.line(x, TOP - 28, x, bottom, color=COMPLETE, thick=2)
    c.text(x, TOP - 32, "checkpoint 10", size=11.5, anchor="start")
    ends = {row.step: row.time_s for row in run.reports if row.rank == 0}
    c.text(LEFT - 12, TOP - 8, "step", size=11.5, color=MUTED, anchor="end")
    for step, middle in (
        (last - 1, (ends[last - 2] + ends[last - 1]) / 2),
        (last, (ends[last - 1] + ends[last]) / 2),
        (last + 1, ends[last] + 0.25),
    ):
        c.text(_x(middle), TOP - 8, str(step), size=11.5, color=MUTED)
    for rank in range(4):
        _lane(c, run, rank)
    first, late = _ended(run, 2), min(_lost(run, rank) for rank in (0, 1, 3))
    for start, end, words, color in (
        (first - 0.35, first + 0.55, "the cause", FAILURE_TEXT),
        (late - 0.1, TO_S, "consequences", MUTED),
    ):
        y = bottom + 34
        c.line(_x(start), y, _x(end), y, color=color, thick=2)
        c.text((_x(start) + _x(end)) / 2, y + 18, words, size=12.5, color=color)
    _legend(c, bottom + 82)
    words = (
        f"The answer: {answer.what}, rank {answer.rank}, step {answer.step}. Restart "
        f"from checkpoint {last - answer.steps_lost}: "
        f"{last} − {last - answer.steps_lost} = {answer.steps_lost} steps lost."
    )
    c.text(LEFT, bottom + 112, words, size=12.5, bold=True, anchor="start")
    return c.svg()


def _ended(run: RecordedRun, rank: int) -> float:
    return next(e.time_s for e in run.events if e.kind == ENDED and e.rank == rank)


def _lost(run: RecordedRun, rank: int) -> float:
    return next(e.time_s for e in run.events if e.kind == LOST and e.rank == rank)


def _lane(c: Canvas, run: RecordedRun, rank: int) -> None:
    """Draw what a rank computes, where it waits, and how it ends."""
    y = TOP + LANE * rank
    c.text(LEFT - 12, y + 19, f"rank {rank}", size=12.5, anchor="end")
    rows = sorted(row for row in run.reports if row.rank == rank)
    before = 0.0
    for row in sorted(rows, key=lambda row: row.step):
        if row.time_s > FROM_S:
            _bar(c, y, before, before + row.own_s, FORWARD)
            _bar(c, y, before + row.own_s, row.time_s, CALL)
        before = row.time_s
    ended = _ended(run, rank)
    entered = [e.time_s for e in run.events if e.kind == ENTERED and e.rank == rank]
    if max(entered) < before:  # it never entered the step after its last report
        _bar(c, y, before, ended, FORWARD)
        x = _x(ended)
        for slope in (-1, 1):
            c.line(
                x - 7, y + 14 - 7 * slope, x + 7, y + 14 + 7 * slope,
                color=FAILURE, thick=3.5,
            )  # fmt: skip
        words = "SIGKILL"
        c.text(x + 14, y + 19, words, size=12, color=FAILURE_TEXT, anchor="start")
        return
    lost = _lost(run, rank)
    _bar(c, y, before, max(entered), FORWARD)
    _bar(c, y, max(entered), lost, CALL)
    middle = (_x(max(entered)) + _x(lost)) / 2
    c.text(middle, y + 19, "entered 13, waits for the others", size=11.5)
    c.line(_x(lost), y - 4, _x(lost), y + TALL + 4, color=FAILURE, thick=3)
    c.text(_x(lost) + 2, y - 8, "timed out", size=11.5, color=MUTED)
    c.rect(_x(ended) - 4, y + 10, 8, 8, fill=INK)


def _bar(c: Canvas, y: float, start: float, end: float, color: str) -> None:
    c.rect(_x(start), y, _x(end) - _x(start), TALL, fill=color, thick=0.8)


def _legend(c: Canvas, y: float) -> None:
    for x, color, words in ((84.0, FORWARD, "computes"), (182.0, CALL, "all-reduce")):
        c.rect(x, y - 11, 14, 14, fill=color, thick=0.8)
        c.text(x + 20, y, words, size=11.5, anchor="start")
    c.rect(292, y - 8, 8, 8, fill=INK)
    c.text(306, y, "exit code 1", size=11.5, anchor="start")


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"drill_timeline.svg": timeline()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
