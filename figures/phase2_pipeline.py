"""GPipe and 1F1B compared; `python -m figures.phase2_pipeline` writes the picture.

The lists are the reference's. The times of the actions come from the table of its
`draw`, and the number of kept microbatches is counted in that table.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from types import ModuleType

from distlab.curriculum import load
from distlab.trace.palette import BACKWARD, FORWARD, GRID, INK, MUTED, SURFACE
from figures.draw import Canvas, write
from figures.phase2_memory import FOLDER

RANKS = 4
MICROBATCHES = 8
WIDE = 19.0  # of a unit of time, in pixels
IDLE = "."


@cache
def unit() -> ModuleType:
    """The reference's schedules."""
    return load("pipeline_parallel")


def table(name: str) -> list[list[str]]:
    """By rank, the action of each unit of time: "F3", "B0" or IDLE."""
    plan = getattr(unit(), name)
    drawn = unit().draw([plan(rank, RANKS, MICROBATCHES) for rank in range(RANKS)])
    rows = [line.split()[2:] for line in drawn.splitlines()[:-1]]
    longest = max(map(len, rows))
    return [row + [IDLE] * (longest - len(row)) for row in rows]


def live(row: list[str]) -> list[int]:
    """Microbatches kept in each unit of time: forward begun, backward not done."""
    begins = [
        cell.startswith("F") and cell not in row[:k] for k, cell in enumerate(row)
    ]
    ends = [
        cell.startswith("B") and cell not in row[k + 1 :] for k, cell in enumerate(row)
    ]
    done = [0, *accumulate(map(int, ends))][:-1]
    return [
        begun - gone
        for begun, gone in zip(accumulate(map(int, begins)), done, strict=True)
    ]


def schedules() -> str:
    """Both tables, with a counter of the kept microbatches below each row."""
    both = {"GPipe": table("gpipe"), "1F1B": table("one_f_one_b")}
    peaks = {name: [max(live(row)) for row in rows] for name, rows in both.items()}
    times = {name: len(rows[0]) for name, rows in both.items()}
    c = Canvas(
        "schedules",
        780,
        540,
        title=f"GPipe and 1F1B on {RANKS} stages with {MICROBATCHES} microbatches",
        desc=(
            "Two tables with a row per rank and a column per unit of time; a forward "
            "takes one unit, a backward two. Empty cells are the bubble. "
            + " ".join(
                f"{name} takes {times[name]} units and keeps at most "
                f"{', '.join(map(str, peaks[name]))} microbatches on ranks 0 to "
                f"{RANKS - 1}."
                for name in both
            )
            + " Small numbers below each row count the kept microbatches in each unit."
        ),
    )
    for place, (name, rows) in enumerate(both.items()):
        top = 54 + 236 * place
        c.text(24, top - 14, name, size=15, bold=True, anchor="start")
        c.text(
            74 + WIDE * times[name],
            top - 14,
            f"{times[name]} units of time",
            size=12,
            anchor="end",
        )
        c.text(766, top - 14, "keeps", size=12, bold=True, anchor="end")
        for rank, row in enumerate(rows):
            _lane(c, top + 48 * rank, rank, row)
    _legend(c, 506)
    return c.svg()


def _lane(c: Canvas, y: float, rank: int, row: list[str]) -> None:
    """A rank's row of the table, its counter, and its peak."""
    c.text(24, y + 15, f"rank {rank}", size=12, bold=True, anchor="start")
    place = 0
    while place < len(row):
        cell = row[place]
        units = 1 if cell == IDLE else row.count(cell)
        x = 74 + WIDE * place
        if cell == IDLE:
            c.rect(x, y, WIDE, 22, fill=SURFACE, stroke=GRID, thick=0.5)
        else:
            forward = cell.startswith("F")
            c.rect(
                x, y, WIDE * units, 22, fill=FORWARD if forward else BACKWARD, thick=0.8
            )
            c.text(x + WIDE * units / 2, y + 15.5, cell, size=11, mono=True)
        place += units
    counts = live(row)
    for place, count in enumerate(counts):
        words, strong = str(count), count == max(counts)
        c.text(
            74 + WIDE * (place + 0.5),
            y + 34,
            words,
            size=11,
            color=INK if strong else MUTED,
            bold=strong,
        )
    c.text(748, y + 17, str(max(counts)), size=16, bold=True)


def _legend(c: Canvas, y: float) -> None:
    """The meaning of the cells and the small numbers."""
    for x, fill, stroke, words in (
        (74, FORWARD, INK, "F0: forward of microbatch 0"),
        (286, BACKWARD, INK, "B0: backward of microbatch 0"),
        (508, SURFACE, GRID, "bubble"),
    ):
        c.rect(x, y - 12, 16, 14, fill=fill, stroke=stroke, thick=0.8)
        c.text(x + 22, y, words, size=11.5, anchor="start")
    words = "small numbers: microbatches that the rank keeps in this unit of time"
    c.text(74, y + 20, words, size=11.5, anchor="start")


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"schedules.svg": schedules()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
