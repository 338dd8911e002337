"""A checkpoint on fewer ranks, and buckets in another order.

`python -m figures.phase4_ports` writes both.
"""

from __future__ import annotations

from pathlib import Path

from distlab.trace.palette import (
    COMPLETE,
    COMPLETE_TEXT,
    FAILURE,
    FAILURE_TEXT,
    GRADIENTS,
    INK,
    MUTED,
    NEUTRAL,
    RANK_COLORS,
    SURFACE,
    WEIGHTS,
    text_on,
)
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase4_production" / "figures"
ROWS, OWN = 6, (5, 6, 7)  # of the weight; the plain tensor of each rank that saved
SAVED, LOADED = 3, 2  # ranks
CELL = 26.0


def resharded() -> str:
    """Draw what three ranks save, name by name, and what two ranks load."""
    c = Canvas(
        "resharded",
        760,
        372,
        title="Saved by three ranks, loaded by two",
        desc=(
            "Three columns. On the left three ranks, each with two of the six rows of "
            "model.weight, a DTensor, and with a plain tensor of its own: 5, 6 and 7. "
            "In the middle the checkpoint, with all six rows, with own, which is 5 "
            "only, and with own of rank 0, 1 and 2, which are 5, 6 and 7. On the right "
            "two ranks: each loads three rows; own is 5 on both, and own of rank r is "
            "5 and 6."
        ),
    )
    for x, words in (
        (40, "saved by 3 ranks"), (296, "the checkpoint"), (548, "loaded by 2 ranks"),
    ):  # fmt: skip
        c.text(x, 34, words, size=13, bold=True, anchor="start")
    _ranks(c, 40, SAVED, {"own": OWN, "own of rank r": OWN})
    _ranks(c, 548, LOADED, {"own": OWN[:1] * 2, "own of rank r": OWN})
    c.rect(290, 48, 210, 266, fill=SURFACE, thick=1.5, round_=8)
    c.text(302, 70, "model.weight", size=12, mono=True, anchor="start")
    for row in range(ROWS):
        _cell(c, 302 + CELL * row, 78, str(row), WEIGHTS)
    c.text(302, 136, "own", size=12, mono=True, anchor="start")
    _cell(c, 302, 144, str(OWN[0]), RANK_COLORS[0])
    c.text(340, 162, "6 and 7 are lost", size=11.5, color=FAILURE_TEXT, anchor="start")
    for rank, value in enumerate(OWN):
        y = 206 + 34 * rank
        words = f"own of rank {rank}"
        c.text(302, y + 18, words, size=12, mono=True, anchor="start")
        _cell(c, 440, y, str(value), RANK_COLORS[rank])
    c.arrow(250, 180, 284, 180, color=MUTED)
    c.arrow(504, 180, 540, 180, color=MUTED)
    c.text(40, 354, "blue: rows of a DTensor, each on one rank; other colors: plain "
           "tensors, by the rank that had them", size=11.5, color=MUTED,
           anchor="start")  # fmt: skip
    return c.svg()


def _ranks(c: Canvas, x: float, count: int, plain: dict[str, tuple[int, ...]]) -> None:
    """Draw the rows and the plain tensors that each of `count` ranks has."""
    tall = 266 / count
    for rank in range(count):
        y = 48 + tall * rank
        c.rect(x, y, 200, tall - 8, fill=SURFACE, thick=1.5, round_=8)
        c.text(x + 12, y + 20, f"rank {rank}", size=12, anchor="start")
        each = ROWS // count
        for number in range(each):
            _cell(c, x + 12 + CELL * number, y + 30, str(each * rank + number), WEIGHTS)
        at = x + 24 + CELL * each
        names = ("own",) if count == SAVED else tuple(plain)
        for number, name in enumerate(names):
            value = plain[name][rank]
            top = y + 30 + 46 * number
            left = at if not number else x + 12
            _cell(c, left, top, str(value), RANK_COLORS[OWN.index(value)])
            c.text(left + CELL + 6, top + 18, name, size=11, mono=True, anchor="start")


def _cell(c: Canvas, x: float, y: float, words: str, color: str) -> None:
    c.rect(x, y, CELL, CELL, fill=color, thick=1)
    c.text(x + CELL / 2, y + 18, words, size=13, bold=True, color=text_on(color))


def rebuilt() -> str:
    """Draw rank 0's bucket of two steps, and where its residual goes."""
    c = Canvas(
        "rebuilt",
        760,
        318,
        title="The second step's bucket has another order",
        desc=(
            "Rank 0, two parameters a and b in one bucket. In step 1 the bucket is a, "
            "b with the gradients 6 and 1: 6 is sent, and the residual of b is 1. In "
            "step 2 the bucket is b, a with the gradients 1 and 6. With the residual "
            "kept by parameter, b has 1 + 1 = 2 and a has 6: right. With the residual "
            "kept by bucket index, the second place gets it: b has 1 and a has "
            "6 + 1 = 7, which is wrong, and no error is raised."
        ),
    )
    _bucket(c, 40, "step 1: the bucket", (("a", "6"), ("b", "1")), GRADIENTS)
    _bucket(c, 40, "its residual", (("a", "0"), ("b", "1")), NEUTRAL, top=190)
    c.text(164, 92, "6 is sent", size=11.5, anchor="start")
    c.arrow(88, 124, 88, 158, color=MUTED)
    _bucket(c, 268, "step 2: the bucket", (("b", "1"), ("a", "6")), GRADIENTS)
    for top, words, cells, color, ink, note in (
        (54, "by parameter", (("b", "1 + 1 = 2"), ("a", "6")), COMPLETE,
         COMPLETE_TEXT, "right"),
        (190, "by bucket index", (("b", "1"), ("a", "6 + 1 = 7")), FAILURE,
         FAILURE_TEXT, "wrong, and no error"),
    ):  # fmt: skip
        _bucket(
            c, 500, f"residual {words}", cells, SURFACE, top=top, wide=84, edge=color
        )
        c.text(500, top + 80, note, size=12.5, bold=True, color=ink, anchor="start")
    c.arrow(378, 84, 488, 84, color=COMPLETE)
    c.arrow(378, 98, 488, 220, color=FAILURE)
    c.text(40, 296, "rank 0, k = 1; above a number the parameter that it belongs to",
           size=11.5, color=MUTED, anchor="start")  # fmt: skip
    return c.svg()


def _bucket(
    c: Canvas,
    x: float,
    title: str,
    cells: tuple[tuple[str, str], ...],
    fill: str,
    *,
    top: float = 54,
    wide: float = 48,
    edge: str = INK,
) -> None:
    c.text(x, top - 16, title, size=12.5, bold=True, anchor="start")
    for number, (name, words) in enumerate(cells):
        left = x + wide * number
        c.text(left + wide / 2, top + 12, name, size=13, bold=True, mono=True)
        c.rect(left, top + 20, wide, 40, fill=fill, stroke=edge, thick=2)
        c.text(left + wide / 2, top + 45, words, size=13)


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"rebuilt.svg": rebuilt(), "resharded.svg": resharded()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
