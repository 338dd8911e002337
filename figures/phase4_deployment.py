"""Who restarts whom on four platforms; `python -m figures.phase4_deployment`.

What starts and restarts is read from no file: it is that of `deployment/`, by hand.
"""

from __future__ import annotations

from pathlib import Path

from distlab.trace.palette import INK, LINK_BUSY, MUTED, NEUTRAL, SURFACE
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase4_production" / "figures"
NOBODY = ""
LEVELS = (64, 164, 264)  # the tops of the boxes
TALL, WIDE, STEP, LEFT = 44, 156, 180, 32
Row = tuple[str, str, bool, str]
"""A box, its second line, whether it restarts the box below, and the words there."""

PLATFORMS: tuple[tuple[str, tuple[Row, ...], str], ...] = (
    (
        "one machine",
        (
            (NOBODY, "", False, ""),
            ("distlab.launch", "", True, "all ranks, 3 times"),
            ("ranks", "", False, ""),
        ),
        "a local folder",
    ),
    (
        "two containers",
        (
            ("Docker", "on-failure:3", True, "the container"),
            ("distlab.launch", "in each container", True, "all ranks, 3 times"),
            ("ranks", "", False, ""),
        ),
        "a volume",
    ),
    (
        "SLURM",
        (
            ("the queue", "requeue", True, "the job, 2 times"),
            ("torchrun", "on each node", False, "starts them once"),
            ("ranks", "", False, ""),
        ),
        "a shared file system",
    ),
    (
        "Kubernetes",
        (
            ("JobSet", "BlockingRecreate", True, "all pods, 3 times"),
            ("torchrun", "in each pod", True, "all ranks, 3 times"),
            ("ranks", "", False, ""),
        ),
        "a persistent volume",
    ),
)


def who_restarts() -> str:
    """Four columns: whatever restarts is above whatever it restarts."""
    c = Canvas(
        "who-restarts",
        760,
        438,
        title="Who restarts whom, on four platforms",
        desc=(
            "Four columns, each with the ranks at the bottom and whatever restarts "
            f"them above. {'; '.join(_told())}. Nobody restarts the launcher of one "
            "machine. Under all four is the folder of checkpoints, which outlives the "
            "processes, the containers and the nodes."
        ),
    )
    for column, (name, rows, folder) in enumerate(PLATFORMS):
        left = LEFT + STEP * column
        middle = left + WIDE / 2
        c.text(middle, 36, name, size=14, bold=True)
        for top, row in zip(LEVELS, rows, strict=True):
            _level(c, left, top, row)
        c.arrow(middle, 311, middle, 340, color=MUTED, thick=1.5)
        c.text(middle, 379, folder, size=11.5)
    end = LEFT + STEP * 3 + WIDE
    c.rect(LEFT, 342, end - LEFT, 48, thick=1.5, round_=6)
    c.text((LEFT + end) / 2, 360, "checkpoints, in a folder that outlives them all",
           size=12, bold=True)  # fmt: skip
    c.arrow(LEFT, 414, LEFT + 36, 414, color=LINK_BUSY, thick=3)
    c.text(LEFT + 46, 418, "restarts after a failure", size=11.5, anchor="start")
    c.arrow(LEFT + 236, 414, LEFT + 272, 414, color=MUTED, thick=1.5, dash="4 3")
    c.text(LEFT + 282, 418, "starts, but doesn't restart", size=11.5, anchor="start")
    return c.svg()


def _told() -> list[str]:
    """Say each arrow in words."""
    return [
        f"{name}: {box} " + (f"restarts {words}" if restarts else words)
        for name, rows, _ in PLATFORMS
        for box, _, restarts, words in rows
        if words
    ]


def _level(c: Canvas, left: float, top: float, row: Row) -> None:
    """Draw one box of a column, and the arrow to the box below it."""
    box, below, restarts, words = row
    middle = left + WIDE / 2
    if box == NOBODY:
        c.rect(left, top, WIDE, TALL, stroke=MUTED, dash="5 4", round_=6)
        c.text(middle, top + 27, "nobody", size=12, color=MUTED)
        return
    fill = SURFACE if box == "ranks" else NEUTRAL
    c.rect(left, top, WIDE, TALL, fill=fill, thick=1.5, round_=6)
    c.text(middle, top + (19 if below else 27), box, size=12.5, bold=True)
    if below:
        c.text(middle, top + 35, below, size=11, color=MUTED)
    if not words:
        return
    at, start, end = left + 22, top + TALL + 3, top + 98
    if restarts:
        c.arrow(at, start, at, end, color=LINK_BUSY, thick=3)
    else:
        c.arrow(at, start, at, end, color=MUTED, thick=1.5, dash="4 3")
    color = INK if restarts else MUTED
    c.text(at + 12, start + 30, words, size=11.5, color=color, anchor="start")


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"who_restarts.svg": who_restarts()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
