"""The process groups of 2 × 2 ranks; `python -m figures.phase2_mesh` writes it.

Rows and columns come from the reference's `coordinates`.
"""

from __future__ import annotations

from distlab.trace.palette import DATA_PARALLEL, MUTED, NEUTRAL, TENSOR_PARALLEL
from figures.draw import Canvas, write
from figures.phase2_memory import FOLDER
from figures.phase2_tensor import unit


def mesh() -> str:
    """Four ranks as a mesh: a row is one replica, a column one shard."""
    place = {rank: unit().coordinates(rank, 2) for rank in range(4)}
    rows = [[r for r in place if place[r][0] == model] for model in range(2)]
    columns = [[r for r in place if place[r][1] == share] for share in range(2)]
    c = Canvas(
        "mesh",
        760,
        400,
        title="Four ranks as a 2 × 2 mesh, and the two process groups of each rank",
        desc=(
            "A mesh of four ranks. "
            + " ".join(
                f"Ranks {row[0]} and {row[1]} are a row: replica {model}, tensor group."
                for model, row in enumerate(rows)
            )
            + " "
            + " ".join(
                f"Ranks {column[0]} and {column[1]} are a column: shard {share}, a "
                "data group."
                for share, column in enumerate(columns)
            )
            + " Rows have solid frames, columns dashed ones."
        ),
    )

    def at(rank: int) -> tuple[float, float]:
        model, share = place[rank]
        return 190 + 170 * share, 130 + 150 * model

    for model in range(2):
        y = 130.0 + 150 * model
        c.rect(120, y - 52, 310, 104, stroke=TENSOR_PARALLEL, thick=3.5, round_=18)
        c.text(24, y - 2, f"replica {model}", size=13, bold=True, anchor="start")
        c.text(24, y + 15, "tensor group", size=11, color=MUTED, anchor="start")
    for share in range(2):
        x = 190.0 + 170 * share
        box = x - 56, 62, 112, 286
        c.rect(*box, stroke=DATA_PARALLEL, thick=3.5, dash="9 5", round_=18)
        c.text(x, 34, f"shard {share}", size=13, bold=True)
        c.text(x, 51, "data group", size=11, color=MUTED)
    for rank in place:
        x, y = at(rank)
        c.circle(x, y, 36, fill=NEUTRAL)
        c.text(x, y - 2, f"rank {rank}", size=13, bold=True)
        c.text(x, y + 15, str(place[rank]), size=11.5, mono=True)
    lines = (
        (
            TENSOR_PARALLEL,
            "",
            "a row: one model replica",
            "communicates in every layer",
        ),
        (
            DATA_PARALLEL,
            "9 5",
            "a column: the same shard",
            "communicates once per step",
        ),
    )
    for number, (color, dash, words, below) in enumerate(lines):
        y = 150 + 110 * number
        c.rect(478, y - 22, 34, 34, stroke=color, thick=3.5, dash=dash, round_=8)
        c.text(526, y - 6, words, size=13, bold=True, anchor="start")
        c.text(526, y + 12, below, size=11.5, anchor="start")
    c.text(275, 384, "each rank is in one row and in one column", size=12.5)
    return c.svg()


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"mesh.svg": mesh()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
