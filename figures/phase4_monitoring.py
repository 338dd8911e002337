"""Who waits in a step, and what is exposed; `python -m figures.phase4_monitoring`."""

from __future__ import annotations

from pathlib import Path

from distlab.trace.palette import (
    BACKWARD,
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


LANES = (
    ("buckets overlap", 10.0, ((2, 4), (4, 6), (6, 8), (8, 10.5))),
    ("communication takes longer", 6.0, ((2, 5), (5, 8), (8, 11.5))),
    ("one bucket, sent last", 8.0, ((8, 12),)),
)
"""What it is, when compute ends, and the spans of communication; in ms."""


def exposed() -> str:
    """Three backward passes: what of the communication is exposed."""
    c = Canvas(
        "exposed",
        760,
        330,
        title="Exposed communication in three backward passes",
        desc=(
            "Time runs to the right. Each of three pictures has a lane for compute "
            "and a lane for communication; exposed communication is hatched. First, "
            "buckets overlap with compute, and half a millisecond is exposed. Then "
            "communication takes longer than compute and is exposed for five and a "
            "half milliseconds. Last, one bucket is sent after all compute: its four "
            "milliseconds are exposed."
        ),
    )
    left, scale = 150, 46.0
    for place, (name, end, spans) in enumerate(LANES):
        y = 20 + 98 * place
        rest = sum(max(0.0, stop - max(start, end)) for start, stop in spans)
        words = f"{name}: {rest:g} ms exposed"
        c.text(left, y + 10, words, size=12.5, anchor="start", bold=True)
        c.text(left - 12, y + 35, "compute", size=12, anchor="end")
        c.text(left - 12, y + 65, "communication", size=12, anchor="end")
        c.rect(left, y + 18, scale * end, 26, fill=BACKWARD)
        for start, stop in spans:
            c.rect(left + scale * start, y + 48, scale * (stop - start), 26, fill=CALL)
            if stop > end:
                first = max(start, end)
                c.hatch(left + scale * first, y + 51, scale * (stop - first), 20)
        x = left + scale * end
        c.line(x, y + 18, x, y + 80, color=MUTED, thick=1, dash="4 3")
    c.text(left, 322, "hatched: exposed", size=11.5, color=MUTED, anchor="start")
    return c.svg()


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"step_lanes.svg": step_lanes(), "exposed.svg": exposed()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
