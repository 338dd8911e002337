"""Error feedback on one small gradient, and PowerSGD's shapes.

`python -m figures.phase4_compression` writes both.
"""

from __future__ import annotations

from pathlib import Path

from distlab.trace.palette import (
    CALL,
    FORWARD,
    GRADIENTS,
    INK,
    LINK_BUSY,
    MUTED,
    RANK_COLORS,
    SURFACE,
)
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase4_production" / "figures"
GRADIENT, LIMIT, STEPS = 0.4, 1.0, 8


def error_feedback() -> str:
    """Eight steps of one element, with what it owes."""
    c = Canvas(
        "error-feedback",
        760,
        300,
        title="Error feedback: a small gradient waits until it is large enough",
        desc=(
            "Eight columns, one for each step. In each step the element's gradient is "
            "0.4, and only what is above 1.0 is sent. In step 1 the residual is 0.4, "
            "in step 2 it is 0.8. In step 3 it would be 1.2: this is sent, and the "
            "residual is 0 again. The same happens in step 6. A row below: without "
            "error feedback nothing is sent in any step."
        ),
    )
    left, base, high, wide = 130, 190, 110.0, 72
    limit = base - high * LIMIT
    held = 0.0
    for step in range(STEPS):
        x = left + wide * step
        c.rect(x, base - high * held, 44, high * held, fill=CALL)
        top = base - high * (held + GRADIENT)
        c.rect(x, top, 44, high * GRADIENT, fill=FORWARD)
        held += GRADIENT
        is_sent = held > LIMIT
        if is_sent:
            c.text(x + 22, top - 8, f"{held:.1f} is sent", size=12, color=INK)
        c.text(x + 22, base + 18, f"step {step + 1}", size=11.5, color=MUTED)
        c.text(x + 22, base + 62, "0 sent", size=11.5, color=MUTED)
        held = 0.0 if is_sent else held
    end = left + wide * STEPS
    c.line(left - 10, limit, end, limit, color=LINK_BUSY, thick=1.5, dash="4 3")
    c.text(left - 16, limit + 4, "others send 1.0", size=11.5, anchor="end")
    c.text(left - 16, base - 20, "with residual", size=11.5, anchor="end")
    c.text(left - 16, base + 62, "without", size=11.5, anchor="end")
    words = "A column: the residual of the steps before, and on it the gradient, 0.4."
    c.text(left, base + 96, words, size=11.5, color=MUTED, anchor="start")
    return c.svg()


A, B, COLUMNS = 8, 6, 2  # rows and columns of M, and R
CELL = 14.0
P_COLOR, Q_COLOR = RANK_COLORS[:2]


def low_rank() -> str:
    """Draw M, P and Q as grids of cells, and the two products that make P and Q."""
    c = Canvas(
        "low-rank",
        760,
        424,
        title="PowerSGD: two thin matrices are sent in place of a gradient",
        desc=(
            f"Matrices as grids of cells. At the top M, {A} by {B}, is about P, {A} by "
            f"{COLUMNS}, times the transpose of Q, {COLUMNS} by {B}: {A * B} numbers "
            f"against {COLUMNS * (A + B)}. Below, one step: a rank multiplies its own "
            "M by Q, the first all_reduce sums the products of all ranks, and the "
            "columns of the sum are made orthonormal: P. Then the rank multiplies the "
            "transpose of its M by P, and the second all_reduce sums these: the next Q."
        ),
    )
    c.text(30, 32, "the approximation", size=13, bold=True, anchor="start")
    x = _matrix(c, 110, 62, A, B, GRADIENTS, "M", "a × b")
    x = _sign(c, x, 62, "≈")
    x = _matrix(c, x, 62, A, COLUMNS, P_COLOR, "P", "a × R")
    x = _sign(c, x, 62, "·")
    x = _matrix(c, x, 62, COLUMNS, B, Q_COLOR, "Qᵀ", "R × b")
    for row, (words, strong) in enumerate(
        (
            (f"here: {COLUMNS} · ({A} + {B}) = {COLUMNS * (A + B)} numbers", True),
            (f"in place of {A} · {B} = {A * B}", False),
            ("a = b = 1000, R = 4:", True),
            ("8,000 in place of 1,000,000", False),
        )
    ):
        y = 84 + 19 * row + (12 if row > 1 else 0)
        c.text(x + 34, y, words, size=12.5, bold=strong, anchor="start")
    c.line(30, 212, 730, 212, color=MUTED, thick=1)
    c.text(30, 240, "one step, on rank r", size=13, bold=True, anchor="start")
    x = _matrix(c, 34, 270, A, B, GRADIENTS, "Mᵣ", "a × b")
    x = _sign(c, x, 270, "·")
    x = _matrix(c, x, 270, B, COLUMNS, Q_COLOR, "Q", "b × R")
    x = _reduced(c, x, "all_reduce 1", "orthonormal")
    x = _matrix(c, x, 270, A, COLUMNS, P_COLOR, "P", "a × R")
    c.line(x + 22, 250, x + 22, 404, color=MUTED, thick=1)
    x = _matrix(c, x + 44, 270, B, A, GRADIENTS, "Mᵣᵀ", "b × a")
    x = _sign(c, x, 270, "·")
    x = _matrix(c, x, 270, A, COLUMNS, P_COLOR, "P", "a × R")
    x = _reduced(c, x, "all_reduce 2", "")
    _matrix(c, x, 270, B, COLUMNS, Q_COLOR, "next Q", "b × R")
    return c.svg()


def _matrix(
    c: Canvas,
    x: float,
    y: float,
    rows: int,
    columns: int,
    color: str,
    name: str,
    shape: str,
) -> float:
    """Draw a grid in the middle of a band of 8 rows; return where it ends."""
    top = y + CELL * (A - rows) / 2
    for row in range(rows):
        for column in range(columns):
            at = x + CELL * column, top + CELL * row
            c.rect(*at, CELL, CELL, fill=color, stroke=SURFACE, thick=0.8)
    c.rect(x, top, CELL * columns, CELL * rows, thick=1.5)
    middle = x + CELL * columns / 2
    c.text(middle, top - 7, name, size=13, bold=True)
    c.text(middle, top + CELL * rows + 16, shape, size=11.5, color=MUTED)
    return x + CELL * columns


def _sign(c: Canvas, x: float, y: float, words: str) -> float:
    c.text(x + 17, y + CELL * A / 2 + 6, words, size=18, bold=True)
    return x + 34


def _reduced(c: Canvas, x: float, words: str, below: str) -> float:
    """Draw an arrow that sums over the ranks; return where it ends."""
    y = 270 + CELL * A / 2
    c.arrow(x + 10, y, x + 92, y, color=LINK_BUSY, thick=3)
    c.text(x + 50, y - 10, words, size=11.5)
    c.text(x + 50, y + 20, below, size=11.5)
    return x + 102


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {
        "error_feedback.svg": error_feedback(),
        "low_rank.svg": low_rank(),
    }


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
