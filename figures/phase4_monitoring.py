"""Who waits for whom in a step; `python -m figures.phase4_monitoring` draws it."""

from __future__ import annotations

from pathlib import Path

from distlab.trace.palette import (
    CALL,
    FORWARD,
    INK,
    LINK_BUSY,
    MUTED,
    SURFACE,
)
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase4_production" / "figures"
STEPS = ((0.1, 0.35), (0.1, 0.75), (0.05, 0.4))  # data and compute of each rank, s
SENDING_S = 0.15  # of the collective, once all ranks are there


def step_lanes() -> str:
    """One step of three ranks, the second one slow."""
    c = Canvas(
        "step-lanes",
        760,
        250,
        title="One step of three ranks: two of them wait for the third",
        desc=(
            "Time runs to the right. Each of three rows is a rank, with a bar for "
            "data, one for compute and one for communication. All rows end at the "
            "same time. Rank 1 computes longest; its communication is the shortest "
            "and has no waiting in it. Ranks 0 and 2 call the collective early, and "
            "wait, hatched, until rank 1 calls it."
        ),
    )
    left, scale = 100, 600.0
    all_there = max(data + compute for data, compute in STEPS)
    for rank, (data, compute) in enumerate(STEPS):
        y = 40 + 54 * rank
        c.text(left - 12, y + 22, f"rank {rank}", size=12.5, anchor="end")
        c.rect(left, y, scale * data, 36, fill=SURFACE)
        c.rect(left + scale * data, y, scale * compute, 36, fill=FORWARD)
        c.text(left + scale * (data + compute / 2), y + 23, "compute", size=12)
        came = data + compute
        c.rect(
            left + scale * came,
            y,
            scale * (all_there - came + SENDING_S),
            36,
            fill=CALL,
        )
        if came < all_there:
            c.hatch(left + scale * came, y + 4, scale * (all_there - came), 28)
    x = left + scale * all_there
    c.line(x, 28, x, 190, color=LINK_BUSY, thick=1.5, dash="4 3")
    c.text(x, 22, "rank 1 calls all_reduce", size=12, color=INK)
    c.text(left + 30, 208, "data", size=11.5, color=MUTED)
    c.text(left + scale * 0.625, 208, "communication", size=11.5, color=MUTED)
    c.text(left + scale * 0.925, 208, "the sum is sent", size=11.5, color=MUTED)
    words = (
        "hatched: waiting. All ranks end together; rank 1, the straggler, has the "
        "shortest communication."
    )
    c.text(left, 236, words, size=11.5, color=MUTED, anchor="start")
    return c.svg()


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"step_lanes.svg": step_lanes()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
