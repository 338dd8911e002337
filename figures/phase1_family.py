"""The pictures of 1.14 and 1.17: six collectives, and a star beside a tree."""

from __future__ import annotations

from collections.abc import Callable

from distlab.trace.palette import (
    COMPLETE,
    GRID,
    INK,
    LINK_BUSY,
    MUTED,
    NEUTRAL,
    RANK_COLORS,
    SURFACE,
)
from figures.draw import Canvas, write
from figures.phase1 import FOLDER

Cell = tuple[str, str] | None
"""The label and color of one chunk of a rank's memory; None is undefined."""
Memory = Callable[[int, int], Cell]
"""The cell of (rank, chunk)."""

NAMES = "abcd"
SIDE, HIGH, STEP = 38, 17, 43


def _own(rank: int, chunk: int) -> Cell:
    return f"{NAMES[rank]}{chunk}", RANK_COLORS[rank]


def _sum(_rank: int, chunk: int) -> Cell:
    return f"Σ{chunk}", COMPLETE


def _only(memory: Memory, when: Callable[[int, int], bool]) -> Memory:
    return lambda rank, chunk: memory(rank, chunk) if when(rank, chunk) else None


def _as_rank(one: int, memory: Memory) -> Memory:
    return lambda _rank, chunk: memory(one, chunk)


def _mine(rank: int, chunk: int) -> bool:
    return rank == chunk


def _of_chunk(_rank: int, chunk: int) -> Cell:
    return NAMES[chunk], RANK_COLORS[chunk]


PANELS: list[tuple[str, str, Memory, Memory]] = [
    (
        "broadcast",
        "from rank 1 to all",
        _only(_own, lambda rank, _: rank == 1),
        _as_rank(1, _own),
    ),
    (
        "scatter",
        "chunk r of rank 1 to rank r",
        _only(_own, lambda rank, _: rank == 1),
        _only(_as_rank(1, _own), _mine),
    ),
    (
        "gather",
        "one chunk per rank to rank 1",
        _only(_of_chunk, _mine),
        _only(_of_chunk, lambda rank, _: rank == 1),
    ),
    ("reduce_scatter", "chunk r of the sum to rank r", _own, _only(_sum, _mine)),
    ("all_gather", "one chunk per rank, to all", _only(_of_chunk, _mine), _of_chunk),
    ("all_reduce", "both above, one after the other", _own, _sum),
]


def _squares(c: Canvas, x: float, y: float, memory: Memory) -> None:
    """Draw four ranks side by side, each with its four chunks from top to bottom."""
    for rank in range(4):
        for chunk in range(4):
            cell = memory(rank, chunk)
            left, top = x + STEP * rank, y + HIGH * chunk
            fill = cell[1] if cell else SURFACE
            c.rect(left, top, SIDE, HIGH, fill=fill, stroke=INK if cell else NEUTRAL)
            if cell:
                c.text(left + SIDE / 2, top + 13, cell[0], size=11, bold=True)
        c.rect(x + STEP * rank, y, SIDE, 4 * HIGH, thick=1.5)


def family_of_six() -> str:
    """Six collectives, before and after, four colored squares each."""
    c = Canvas(
        "collectives",
        800,
        440,
        title="Six collectives on four ranks, before and after",
        desc=(
            "Each rank is a column of four chunks. Left, with root rank 1: broadcast "
            "copies its four chunks to all ranks; scatter sends chunk r to rank r; "
            "gather collects one chunk of each rank on rank 1. Right, without a root: "
            "reduce_scatter leaves chunk r of the sum on rank r; all_gather leaves "
            "the chunks of all ranks on every rank; all_reduce leaves the full sum on "
            "all ranks, which equals reduce_scatter and then all_gather."
        ),
    )
    c.text(200, 30, "with a root (rank 1)", size=14, bold=True)
    c.text(600, 30, "without a root", size=14, bold=True)
    c.line(400, 18, 400, 400, color=GRID)
    for number, (name, what, before, after) in enumerate(PANELS):
        x, y = 14 + 400 * (number // 3), 78 + 122 * (number % 3)
        c.text(x, y - 22, name, size=14, bold=True, mono=True, anchor="start")
        c.text(x + 372, y - 22, what, size=12, anchor="end")
        for rank in range(4):
            for start in (x, x + 204):
                c.text(start + STEP * rank + 19, y - 5, str(rank), color=MUTED, size=11)
        _squares(c, x, y, before)
        c.arrow(x + 174, y + 2 * HIGH, x + 199, y + 2 * HIGH)
        _squares(c, x + 204, y, after)
    c.text(
        400,
        426,
        "a2: chunk 2 of rank 0 (a to d are ranks 0 to 3) · "
        "Σ2: chunk 2 of the sum · empty: undefined",
        size=11.5,
    )
    return c.svg()


def _lanes(
    c: Canvas, left: float, title: str, rounds: list[list[tuple[int, int]]]
) -> None:
    """Draw eight rows, filled from the round in which the rank has the tensor."""
    c.text(left + 175, 34, title, size=15, bold=True)
    reached = {0: 0}
    for number, messages in enumerate(rounds, 1):
        reached |= {dst: number for _, dst in messages}
        c.text(left + 20 + 46 * number, 60, str(number), size=11, color=MUTED)
    c.text(left + 20, 60, "round", size=11, color=MUTED)
    for rank in range(8):
        y = 82 + 34 * rank
        c.text(left + 8, y + 4, str(rank), size=12, bold=True)
        begin = left + 43 + 46 * reached[rank]
        c.line(left + 24, y, begin, y, color=MUTED, thick=1, dash="3 3")
        c.line(begin, y, left + 373, y, color=COMPLETE, thick=5)
    for number, messages in enumerate(rounds, 1):
        x = left + 20 + 46 * number
        for src, dst in messages:
            y1, y2 = 82 + 34 * src, 82 + 34 * dst - 3
            c.arrow(x - 12, y1, x + 18, y2, thick=1.5, color=LINK_BUSY)


def star_and_tree() -> str:
    """A broadcast to eight ranks: seven rounds, or three."""
    c = Canvas(
        "tree",
        800,
        408,
        title="A broadcast to eight ranks as a star and as a tree",
        desc=(
            "Two diagrams with a row per rank, 0 to 7, and rounds from left to "
            "right. Left, a star: rank 0 sends one message in each of seven rounds. "
            "Right, a tree: 0 to 1 in round one; 0 to 2 and 1 to 3 in round two; 0 "
            "to 4, 1 to 5, 2 to 6 and 3 to 7 in round three. Both take "
            "seven messages."
        ),
    )
    star = [[(0, dst)] for dst in range(1, 8)]
    tree = [[(r, r + reach) for r in range(reach)] for reach in (1, 2, 4)]
    _lanes(c, 12, "star: rank 0 sends every copy", star)
    _lanes(c, 412, "tree: receivers forward it", tree)
    c.line(400, 20, 400, 345, color=GRID)
    c.text(200, 362, "7 messages, 7 rounds", size=13)
    c.text(600, 362, "7 messages, 3 rounds", size=13)
    c.line(190, 388, 214, 388, color=COMPLETE, thick=5)
    c.text(222, 392, "the rank has the tensor", size=12, anchor="start")
    c.arrow(430, 388, 460, 388, thick=1.5, color=LINK_BUSY)
    c.text(468, 392, "a message", size=12, anchor="start")
    return c.svg()


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"collectives.svg": family_of_six(), "tree.svg": star_and_tree()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
