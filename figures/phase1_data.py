"""The picture of 1.8 and 1.9: ten samples on four ranks, epoch by epoch."""

from __future__ import annotations

import random
from collections.abc import Sequence

from distlab.trace.palette import FAILURE, INK, MUTED, RANK_COLORS, SURFACE
from figures.draw import Canvas, write
from figures.phase1 import FOLDER

SAMPLES, RANKS = 10, 4
LEFT, WIDE, SIDE, STEP = 214, 43, 38, 47.5


def _cell(c: Canvas, place: int, y: float, text: str, *, repeated: bool) -> None:
    x = LEFT + STEP * place
    dash = "4 3" if repeated else ""
    c.rect(
        x,
        y,
        WIDE,
        SIDE,
        fill=RANK_COLORS[place % RANKS],
        round_=4,
        thick=2.5 if repeated else 1,
        dash=dash,
    )
    c.text(x + WIDE / 2, y + 16, text, size=14, bold=True)
    c.text(x + WIDE / 2, y + 31, f"rank {place % RANKS}", size=11)


def _row(
    c: Canvas, y: float, title: str, below: str, order: Sequence[int], total: int
) -> None:
    c.text(20, y + 17, title, size=14, bold=True, anchor="start")
    c.text(20, y + 34, below, size=11.5, anchor="start")
    for place in range(total):
        again = place >= len(order)
        _cell(c, place, y, str(order[place % len(order)]), repeated=again)
    for place in range(total, len(order)):
        x = LEFT + STEP * place
        c.rect(x, y, WIDE, SIDE, fill=SURFACE, stroke=MUTED, round_=4)
        c.text(x + WIDE / 2, y + 16, str(order[place]), size=14, color=MUTED)
        for up in (-5, 5):
            middle, low = x + WIDE / 2, y + 27
            c.line(middle - 5, low + up, middle + 5, low - up, color=FAILURE, thick=2)


def _shuffled(epoch: int) -> list[int]:
    return random.Random(epoch).sample(range(SAMPLES), SAMPLES)


def samples() -> str:
    """Ten samples on four ranks: padded, dropped, shuffled in two epochs."""
    orders = [_shuffled(epoch) for epoch in range(2)]
    in_words = [", ".join(map(str, order)) for order in orders]
    c = Canvas(
        "samples",
        800,
        456,
        title="Ten samples on four ranks: padding, dropping, and two shuffled epochs",
        desc=(
            "Positions go to ranks 0, 1, 2, 3, 0, 1 and so on. Padding: twelve "
            "positions, the last two repeat samples 0 and 1, with a dashed border. "
            "Dropping: eight positions, samples 8 and 9 have an orange cross. With "
            f"set_epoch the order of epoch 0 is {in_words[0]} and that of epoch 1 is "
            f"{in_words[1]}: the samples change ranks. Without set_epoch epoch 1 "
            f"is {in_words[0]} again: every rank has the same samples as before."
        ),
    )
    plain = list(range(SAMPLES))
    _row(c, 20, "padding", "3 per rank, 2 samples repeated", plain, 12)
    _row(c, 78, "dropping", "2 per rank, 2 samples dropped", plain, 8)
    c.line(20, 136, 780, 136, color=MUTED)
    c.text(20, 160, "with set_epoch", size=13, bold=True, anchor="start", color=INK)
    for epoch, order in enumerate(orders):
        what = f"set_epoch({epoch})"
        _row(c, 172 + 52 * epoch, f"epoch {epoch}", what, order, 12)
    c.line(20, 290, 780, 290, color=MUTED)
    c.text(20, 314, "without set_epoch", size=13, bold=True, anchor="start")
    for epoch in range(2):
        what = "the same order again" if epoch else "a shuffled order"
        _row(c, 326 + 52 * epoch, f"epoch {epoch}", what, orders[0], 12)
    c.text(
        20,
        446,
        "dashed border: repeated; cross: dropped; the same shuffle on every rank, "
        "and each rank takes every fourth position",
        size=11,
        anchor="start",
    )
    return c.svg()


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"samples.svg": samples()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
