"""An epoch on 4, then 2, then 3 ranks; `python -m figures.phase4_elastic`."""

from __future__ import annotations

from pathlib import Path

from distlab.given.elastic import GLOBAL_BATCH_SIZE, STAGES
from distlab.trace.palette import (
    ACTIVATIONS,
    BACKWARD,
    FAILURE_TEXT,
    FORWARD,
    INK,
    LINK_BUSY,
    MUTED,
    OPTIMIZER_STATE,
)
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase4_production" / "figures"
RANKS = (FORWARD, BACKWARD, ACTIVATIONS, OPTIMIZER_STATE)
CELL, GAP, LEFT, TOP = 26, 12, 28, 66
BETWEEN = ("two processes end", "one process joins")


def epoch() -> str:
    """One row of samples; a cell has the number of the rank that reads it."""
    c = Canvas(
        "elastic_epoch",
        760,
        168,
        title="One epoch on four, then two, then three ranks",
        desc=(
            "24 samples in the order of the shuffle, in six steps of four. A number in "
            "each sample is the rank that reads it. In steps 0 and 1 there are four "
            "ranks with one sample each. In steps 2 and 3 two ranks have two each. In "
            "steps 4 and 5 there are three ranks: rank 0 has two samples, ranks 1 and "
            "2 have one each. Every step has four samples; each is read once."
        ),
    )
    step, x = 0, float(LEFT)
    for place, (world_size, num_steps) in enumerate(STAGES):
        first = x
        for _ in range(num_steps):
            middle = x + CELL * GLOBAL_BATCH_SIZE / 2
            c.text(middle, TOP - 10, f"step {step}", size=11.5, color=MUTED)
            for number in range(GLOBAL_BATCH_SIZE):
                rank = number % world_size
                c.rect(x, TOP, CELL - 1, 34, fill=RANKS[rank])
                c.text(x + CELL / 2, TOP + 22, str(rank), size=13, color=INK)
                x += CELL
            x += GAP
            step += 1
        last = x - GAP
        generation = f"generation {place + 1}: {world_size} ranks"
        c.line(first, TOP + 46, last, TOP + 46, color=INK, thick=1.5)
        c.text((first + last) / 2, TOP + 66, generation, size=12.5)
        if place < len(BETWEEN):
            edge = x - GAP / 2
            c.line(edge, 34, edge, TOP + 46, color=LINK_BUSY, thick=1.5, dash="4 3")
            c.text(edge, 24, BETWEEN[place], size=12, color=FAILURE_TEXT)
    words = "A number is a rank. Each step has the next four samples of the shuffle."
    c.text(LEFT, TOP + 90, words, size=11.5, color=MUTED, anchor="start")
    return c.svg()


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"elastic_epoch.svg": epoch()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
