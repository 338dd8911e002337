"""The picture of unequal shards; `python -m figures.phase1_means` writes it."""

from __future__ import annotations

from distlab.trace.palette import COMPLETE, FAILURE, INK, MUTED, RANK_COLORS, SURFACE
from figures.draw import Canvas, write
from figures.phase1 import FOLDER


def means() -> str:
    """Sample counts 1 and 3, gradients 2 and 6: sum 8, mean of means 4, right 5."""
    c = Canvas(
        "means",
        760,
        330,
        title="Unequal shards: the mean of the ranks' means is not the mean",
        desc=(
            "A number line from 0 to 9. Rank 0 has one sample, with gradient 2: one "
            "circle at 2. Rank 1 has three samples, whose mean gradient is 6: three "
            "circles at 6. The mean over the four samples is 5, a filled diamond. The "
            "mean of the two ranks' means is 4, a square with a cross, and their sum "
            "is 8, a second square."
        ),
    )

    def at(value: float) -> float:
        return 60 + 72 * value

    c.text(380, 30, "four samples on two ranks: 1 and 3", size=15, bold=True)
    c.arrow(40, 210, 736, 210, color=INK)
    for value in range(10):
        c.line(at(value), 204, at(value), 216)
        c.text(at(value), 234, str(value), size=12, color=MUTED)
    for value, count, color in ((2, 1, RANK_COLORS[0]), (6, 3, RANK_COLORS[1])):
        for sample in range(count):
            c.circle(at(value), 192 - 24 * sample, 10, fill=color)
    c.text(at(2), 268, "rank 0", size=13, bold=True)
    c.text(at(2), 286, "1 sample, gradient 2", size=11.5)
    c.text(at(6) + 14, 268, "rank 1", size=13, bold=True)
    c.text(at(6) + 14, 286, "3 samples, their mean is 6", size=11.5)
    x = at(5)
    c.polygon(
        [(x, 196), (x + 14, 210), (x, 224), (x - 14, 210)], fill=COMPLETE, stroke=INK
    )
    c.line(x, 192, x, 88, color=COMPLETE, thick=2)
    c.text(x - 4, 62, "(1 × 2 + 3 × 6) / 4 = 5  ✓", size=14, bold=True)
    c.text(x - 4, 80, "every sample counts once", size=11.5)
    _crossed(c, at(4), 126)
    c.text(at(2.6), 108, "(2 + 6) / 2 = 4  ✗", size=14, bold=True)
    c.text(at(2.6), 126, "mean of means", size=11.5)
    _crossed(c, at(8), 132)
    c.text(at(8), 108, "2 + 6 = 8  ✗", size=14, bold=True)
    c.text(at(8), 126, "sum", size=11.5)
    return c.svg()


def _crossed(c: Canvas, x: float, top: float) -> None:
    c.rect(x - 11, 199, 22, 22, fill=SURFACE, stroke=FAILURE, thick=2)
    c.line(x - 11, 199, x + 11, 221, color=FAILURE, thick=2)
    c.line(x - 11, 221, x + 11, 199, color=FAILURE, thick=2)
    c.line(x, 195, x, top, color=FAILURE, thick=2, dash="5 3")


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"means.svg": means()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
