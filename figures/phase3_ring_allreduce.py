"""Pictures of the ring: `python -m figures.phase3_ring_allreduce` writes them."""

from __future__ import annotations

from pathlib import Path

from distlab.trace.palette import (
    COMPLETE,
    GRID,
    INK,
    LINK_BUSY,
    LINK_IDLE,
    MUTED,
    PARTIAL_SUMS,
    RECEIVING,
)
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase3_multi_node" / "figures"
RANKS = 4
CELL = 34
Squares = list[list[set[int]]]
"""By rank and chunk: the ranks whose values are in it."""


def states() -> list[Squares]:
    """Before the first step, and after each of the six."""
    now: Squares = [[{rank} for _ in range(RANKS)] for rank in range(RANKS)]
    found = [now]
    for step in range(2 * (RANKS - 1)):
        after = [[set(square) for square in row] for row in now]
        for rank in range(RANKS):
            chunk, right = (rank - step - 1) % RANKS, (rank + 1) % RANKS
            if step < RANKS - 1:
                after[right][chunk] |= now[rank][chunk]
            else:
                after[right][chunk] = set(now[rank][chunk])
        now = after
        found.append(now)
    return found


def _panel(c: Canvas, x: float, y: float, state: Squares, step: int) -> None:
    """A state as squares; those that go down in the next step have a thick edge."""
    for chunk in range(RANKS):
        c.text(x + CELL * (chunk + 0.5), y - 6, str(chunk), size=11, color=MUTED)
    for rank, row in enumerate(state):
        top = y + CELL * rank
        c.text(x - 12, top + 22, str(rank), size=12, bold=True)
        for chunk, ranks in enumerate(row):
            done = len(ranks) == RANKS
            fill = COMPLETE if done else PARTIAL_SUMS[len(ranks) - 1]
            words = "all" if done else "".join(map(str, sorted(ranks)))
            left = x + CELL * chunk
            c.rect(left, top, CELL, CELL, fill=fill, stroke=MUTED)
            c.text(left + CELL / 2, top + 21, words, size=12, mono=True)
    for rank in range(RANKS if step < 2 * (RANKS - 1) else 0):
        left = x + CELL * ((rank - step - 1) % RANKS)
        c.rect(left + 1.5, y + CELL * rank + 1.5, CELL - 3, CELL - 3, thick=3)


def ring_steps() -> str:
    """All six steps of four ranks, as squares."""
    c = Canvas(
        "ring_steps",
        760,
        470,
        title="A ring all-reduce of four ranks, step by step",
        desc=(
            "Seven tables of four ranks by four chunks. A square lists the ranks "
            "whose values are in the sum. In each of the first three steps every rank "
            "sends one chunk to the rank below, which adds it: squares with one, two, "
            "three and at last all four ranks. Then each rank has one finished chunk. "
            "In the last three steps the finished chunks are sent on until all sixteen "
            "squares hold all ranks."
        ),
    )
    names = ["before", "after step 1", "after step 2", "after step 3"]
    names += ["after step 4", "after step 5", "after step 6"]
    c.text(
        380,
        26,
        "reduce_scatter: send a chunk to the next rank, add it there",
        bold=True,
    )
    for step, state in enumerate(states()):
        column, row = (step, 0) if step < RANKS else (step - RANKS + 1, 1)
        x, y = 34 + 186 * column, 78 + 216 * row
        c.text(x + 2 * CELL, y - 24, names[step], size=12.5)
        _panel(c, x, y, state, step)
    c.text(442, 246, "all_gather: send the finished chunks on, add nothing", bold=True)
    c.text(20, 300, "rows: ranks", size=12, anchor="start")
    c.text(20, 320, "columns: chunks", size=12, anchor="start")
    c.rect(21, 334, 18, 18, thick=3)
    c.text(48, 348, "is sent next", size=12, anchor="start")
    c.text(20, 374, "(rank 3 sends to 0)", size=12, anchor="start")
    c.text(20, 402, "01: the sum of", size=12, anchor="start")
    c.text(20, 418, "ranks 0 and 1", size=12, anchor="start")
    c.text(380, 456, "every rank sends one chunk in every step: 2 (4 − 1) = 6 chunks")
    return c.svg()


def _lanes(c: Canvas, top: float, name: str) -> None:
    c.text(30, top - 12, name, size=14, bold=True, anchor="start")
    for rank in range(8):
        y = top + 20 * rank
        c.text(40, y + 14, str(rank), size=11)
        c.rect(56, y + 2, 14 * UNIT, 15, fill=LINK_IDLE, stroke=GRID)


UNIT = 48.0  # one message of the whole tensor


def star_ring() -> str:
    """The same all-reduce of eight ranks, twice, on one axis of time."""
    c = Canvas(
        "star_ring",
        760,
        470,
        title="A star and a ring of eight ranks, on one axis of time",
        desc=(
            "Above, a star: in fourteen equal steps rank 0 receives from each of the "
            "seven other ranks, and then sends to each of them; every other rank is "
            "busy for two steps. Below, a ring: all eight ranks send and receive all "
            "the time, in fourteen steps of one eighth of the length, and finish "
            "before the second message of the star."
        ),
    )
    _lanes(c, 46, "star (1.4): every message goes through rank 0")
    for step in range(14):
        other = step % 7 + 1
        x = 56 + UNIT * step
        sender, taker = (other, 0) if step < 7 else (0, other)
        c.rect(x, 46 + 20 * sender + 2, UNIT - 1, 15, fill=LINK_BUSY, stroke=LINK_BUSY)
        c.rect(x, 46 + 20 * taker + 2, UNIT - 1, 15, fill=RECEIVING, stroke=RECEIVING)
    _lanes(
        c, 252, "ring (3.3): every rank sends and receives 1/8 of the tensor at a time"
    )
    for step in range(14):
        for rank in range(8):
            x, y = 56 + UNIT / 8 * step, 252 + 20 * rank
            c.rect(x, y + 2, UNIT / 8 - 1, 7, fill=LINK_BUSY, stroke="none")
            c.rect(x, y + 10, UNIT / 8 - 1, 7, fill=RECEIVING, stroke="none")
    end = 56 + UNIT * 14 / 8
    c.line(end, 250, end, 420, color=INK, dash="4 3")
    c.text(end + 8, 344, "done: 14 steps of S / 8", size=13, anchor="start")
    c.arrow(56, 432, 56 + 14 * UNIT, 432, color=MUTED)
    c.text(56 + 14 * UNIT, 450, "time", size=12, anchor="end", color=MUTED)
    c.rect(60, 442, 14, 12, fill=LINK_BUSY, stroke=LINK_BUSY)
    c.text(80, 453, "sends", size=12, anchor="start")
    c.rect(140, 442, 14, 12, fill=RECEIVING, stroke=RECEIVING)
    c.text(160, 453, "receives", size=12, anchor="start")
    c.text(250, 453, "rows: ranks 0 to 7", size=12, anchor="start")
    c.text(400, 453, "S: bytes of the tensor", size=12, anchor="start")
    return c.svg()


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"ring_steps.svg": ring_steps(), "star_ring.svg": star_ring()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
