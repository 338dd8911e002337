"""Time of three all-reduces, and two levels; `python -m figures.phase3_topology`.

The curves come from the formulas that the simulator confirms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from distlab.sim import AlphaBeta
from distlab.trace.palette import (
    ALGORITHMS,
    GRID,
    HIGHLIGHT,
    INK,
    LINK_BUSY,
    MUTED,
    NEUTRAL,
    RANK_COLORS,
    SURFACE,
)
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase3_multi_node" / "figures"
LINK = AlphaBeta(alpha_s=10e-6, bytes_per_s=12.5e9)
RANKS = 64
POWERS = (8, 32)  # of two: 256 bytes to 4 GiB
SECONDS = (1e-5, 100.0)
PLOT = (90, 60, 480, 280)  # left, top, width, height


def crossover() -> str:
    """Seconds against bytes, both logarithmic, for three all-reduces on 64 ranks."""
    c = Canvas(
        "crossover",
        760,
        410,
        title=f"Time of three all-reduces on {RANKS} ranks, by size of the tensor",
        desc=(
            "Seconds against bytes, both logarithmic. Each of the three curves is flat "
            "on the left and rises on the right. Recursive doubling lies lowest on the "
            "left, the ring lowest on the right; they cross at 3.7 million bytes. The "
            "naive algorithm starts at the ring and ends far above both."
        ),
    )
    left, top, width, height = PLOT
    for power in range(*POWERS, 4):
        x = _x(2**power)
        c.line(x, top, x, top + height, color=GRID, thick=1)
        c.text(x, top + height + 18, _bytes(2**power), size=11)
    for exponent in range(-5, 3):
        y = _y(10.0**exponent)
        c.line(left, y, left + width, y, color=GRID, thick=1)
        c.text(left - 8, y + 4, _time(exponent), size=11, anchor="end")
    curves: tuple[tuple[str, str, Callable[[float], float]], ...] = (
        ("naive", ALGORITHMS["naive"], lambda s: 2 * (RANKS - 1) * LINK.message_s(s)),
        (
            "ring",
            ALGORITHMS["ring"],
            lambda s: 2 * (RANKS - 1) * LINK.message_s(s / RANKS),
        ),
        (
            "recursive doubling",
            ALGORITHMS["recursive doubling"],
            lambda s: math.log2(RANKS) * LINK.message_s(s),
        ),
    )
    for name, color, seconds in curves:
        _curve(c, seconds, color)
        c.text(
            left + width + 8,
            _y(seconds(2.0 ** POWERS[1])) + 4,
            name,
            size=12.5,
            color=INK,
            anchor="start",
        )
    _crossing(c)
    c.text(left, 40, f"α = 10 µs, B = 1 / β = 12.5 GB/s, {RANKS} ranks", anchor="start")
    c.text(left + width / 2, top + height + 44, "bytes of the tensor", size=12.5)
    c.text(left - 8, top - 14, "time", size=12.5, anchor="end")
    return c.svg()


def _crossing(c: Canvas) -> None:
    rounds, steps = math.log2(RANKS), 2 * (RANKS - 1)
    alphas = (steps - rounds) * LINK.alpha_s * LINK.bytes_per_s
    size = alphas / (rounds - steps / RANKS)
    took_s = rounds * LINK.message_s(size)
    assert math.isclose(took_s, steps * LINK.message_s(size / RANKS))
    x, y = _x(size), _y(took_s)
    c.circle(x, y, 6, stroke=INK)
    c.line(x, y + 8, x, PLOT[1] + PLOT[3], color=MUTED, dash="4 4", thick=1)
    c.text(x + 12, y + 34, f"{size / 1e6:.1f} MB", size=12.5, anchor="start")
    c.text(x - 12, y + 74, "latency dominates", size=11.5, color=MUTED, anchor="end")
    c.text(
        x + 12, y + 74, "bandwidth dominates", size=11.5, color=MUTED, anchor="start"
    )


def _curve(c: Canvas, seconds: Callable[[float], float], color: str) -> None:
    sizes = [2.0 ** (power / 2) for power in range(2 * POWERS[0], 2 * POWERS[1] + 1)]
    points = [(_x(size), _y(seconds(size))) for size in sizes]
    for (x1, y1), (x2, y2) in pairwise(points):
        c.line(x1, y1, x2, y2, color=color, thick=2.5)


def _x(size: float) -> float:
    low, high = POWERS
    return PLOT[0] + PLOT[2] * (math.log2(size) - low) / (high - low)


def _y(seconds: float) -> float:
    low, high = map(math.log10, SECONDS)
    return PLOT[1] + PLOT[3] * (high - math.log10(seconds)) / (high - low)


def _bytes(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def _time(exponent: int) -> str:
    names = {-5: "10 µs", -4: "0.1 ms", -3: "1 ms", -2: "10 ms", -1: "0.1 s"}
    return names.get(exponent, f"{10 ** max(exponent, 0)} s")


def nodes() -> str:
    """Two nodes under a switch: every rank sends the full tensor, or its chunk."""
    c = Canvas(
        "nodes",
        760,
        400,
        title="Bytes through the uplinks: recursive doubling and two levels",
        desc=(
            "The same network twice: two nodes of four ranks under a switch. On the "
            "left, recursive doubling: all four ranks of a node send the full tensor, "
            "four thick arrows through one uplink: 4 S. On the right, two levels: "
            "each of the four ranks sends only its chunk, a quarter of the tensor: S "
            "in total. Each rail has its own color."
        ),
    )
    _network(c, 30, "recursive doubling: the last round", is_flat=True)
    _network(c, 400, "two levels: the inter-node stage", is_flat=False)
    c.line(380, 30, 380, 370, color=GRID)
    words = "S: bytes of the tensor"
    c.text(742, 388, words, size=11.5, color=MUTED, anchor="end")
    return c.svg()


def _network(c: Canvas, left: float, title: str, *, is_flat: bool) -> None:
    colors = RANK_COLORS[:4]
    c.text(left, 40, title, size=13, bold=True, anchor="start")
    c.rect(left + 90, 66, 150, 34, fill=NEUTRAL, round_=5)
    c.text(left + 165, 88, "switch", size=12)
    for node in range(2):
        x = left + 174 * node
        c.rect(x, 216, 156, 104, round_=8)
        for local_rank in range(4):
            at = x + 22 + 37 * local_rank
            c.rect(at - 14, 262, 28, 40, fill=SURFACE, round_=3)
            _tensor(c, at - 14, 262, None if is_flat else local_rank, colors)
            c.text(at, 316, str(4 * node + local_rank), size=11)
            end = left + 110 + 88 * node + (local_rank - 1.5) * (9 if is_flat else 6)
            color = HIGHLIGHT if is_flat else LINK_BUSY
            c.arrow(at, 258, end, 104, color=color, thick=4 if is_flat else 2)
        c.text(x + 78, 338, f"node {node}", size=12)
    color, sent = (HIGHLIGHT, "4 · S") if is_flat else (INK, "4 · S / 4")
    words = f"through each uplink: {sent}"
    c.text(left, 368, words, size=13, anchor="start", color=color)


def _tensor(
    c: Canvas, x: float, y: float, chunk: int | None, colors: tuple[str, ...]
) -> None:
    """Four chunks, one above the other: all of them are sent, or one of them."""
    for row in range(4):
        is_sent = chunk is None or chunk == row
        fill = (HIGHLIGHT if chunk is None else colors[row]) if is_sent else SURFACE
        c.rect(x, y + 10 * row, 28, 10, fill=fill, thick=0.7)


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"crossover.svg": crossover(), "nodes.svg": nodes()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
