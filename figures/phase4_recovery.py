"""A standby takes the rank of a frozen process; `python -m figures.phase4_recovery`."""

from __future__ import annotations

from pathlib import Path

from distlab.trace.palette import CALL, FAILURE, FORWARD, INK, LINK_BUSY, MUTED, SURFACE
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase4_production" / "figures"
LEFT, STEP, LANE, TALL = 104, 44, 58, 34
HANGS, FROZEN, FORMED, END = 4, 9, 10.5, 13.4  # in steps


def takes_over() -> str:
    """Lanes of three ranks and a standby."""
    c = Canvas(
        "takes_over",
        760,
        310,
        title="A standby takes the rank of a process that is frozen",
        desc=(
            "Time runs to the right. Processes 0, 1 and 2 are ranks 0, 1 and 2 and "
            "complete four steps: they compute, then communicate. In the fifth step "
            "process 1 hangs while it computes; its heartbeats, dots above its lane, "
            "go on. Processes 0 and 2 wait in a collective. At the limit process 1 is "
            "frozen and gets SIGKILL. Process 3, a standby, becomes rank 1 in "
            "generation 2. Processes 0 and 2 are still ranks 0 and 2, and steps go on."
        ),
    )
    for lane in range(4):
        y = 46 + LANE * lane
        c.text(LEFT - 10, y + 22, f"process {lane}", size=12.5, anchor="end")
        if lane == 1:
            _steps(c, y, 0, HANGS)
            _bar(c, y, HANGS, FROZEN, "hangs", FAILURE)
            for beat in range(int(2 * FROZEN)):
                c.circle(LEFT + STEP * (beat / 2 + 0.2), y - 8, 2.2, fill=INK)
        elif lane == 3:
            _bar(c, y, 0, FROZEN, "ready: a standby without a rank", SURFACE)
            _bar(c, y, FROZEN, FORMED, "join", SURFACE)
            _steps(c, y, FORMED, END)
        else:
            _steps(c, y, 0, HANGS)
            _bar(c, y, HANGS, FROZEN, "waits in a collective", CALL)
            _bar(c, y, FROZEN, FORMED, "join", SURFACE)
            _steps(c, y, FORMED, END)
    hangs, frozen = LEFT + STEP * HANGS, LEFT + STEP * FROZEN
    c.line(hangs, 34, hangs, 40 + 3 * LANE, color=LINK_BUSY, thick=1.5, dash="4 3")
    c.line(frozen, 34, frozen, 278, color=LINK_BUSY, thick=1.5, dash="4 3")
    c.text(frozen, 24, "Frozen, SIGKILL, Form(2)", size=11.5, color=INK)
    c.text(
        LEFT,
        24,
        "dots: heartbeats of process 1",
        size=11.5,
        color=MUTED,
        anchor="start",
    )
    for start, end, word in (
        (0, FROZEN, "generation 1: ranks 0, 1, 2 are processes 0, 1, 2"),
        (FROZEN, END, "generation 2: 0, 3, 2"),
    ):
        middle = LEFT + STEP * (start + end) / 2
        c.text(middle, 300, word, size=12, color=INK)
    return c.svg()


def _bar(c: Canvas, y: float, start: float, end: float, word: str, color: str) -> None:
    c.rect(LEFT + STEP * start, y, STEP * (end - start), TALL, fill=color)
    c.text(LEFT + STEP * (start + end) / 2, y + 21, word, size=11)


def _steps(c: Canvas, y: float, start: float, end: float) -> None:
    """Steps of one unit: most of each computes, the rest communicates."""
    at = start
    while at < end - 0.05:
        width = min(1.0, end - at)
        c.rect(LEFT + STEP * at, y, STEP * width * 0.7, TALL, fill=FORWARD)
        c.rect(LEFT + STEP * (at + width * 0.7), y, STEP * width * 0.3, TALL, fill=CALL)
        at += width


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"takes_over.svg": takes_over()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
