"""A save of two ranks and its crashes; `python -m figures.phase4_checkpoint`."""

from __future__ import annotations

from pathlib import Path

from distlab.trace.palette import CALL, FORWARD, INK, LINK_BUSY, MUTED, SURFACE
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase4_production" / "figures"
CALLS = ("write", "sync", "rename", "sync_folder")
WIDE, LEFT, GAP = 55, 84, 50


def commit() -> str:
    """Two lanes of disk calls, and below what can be loaded after a crash."""
    c = Canvas(
        "commit",
        760,
        276,
        title="A checkpoint of two ranks, and what a crash at each place leaves",
        desc=(
            "Time runs to the right. Ranks 0 and 1 each write, sync and rename a "
            "shard, and sync the folder. Then they exchange their records. Rank 0 "
            "does the same four calls with the manifest, while rank 1 waits. A second "
            "exchange ends the save. A row below says which checkpoint can be loaded "
            "after a crash: the old one until the manifest is renamed, the old or the "
            "new one until the folder is synced, the new one from then on."
        ),
    )
    first = LEFT + 4 * WIDE
    second = first + GAP
    end = second + 4 * WIDE
    for rank in range(2):
        y = 44 + 56 * rank
        c.text(LEFT - 12, y + 23, f"rank {rank}", size=12.5, anchor="end")
        _calls(c, LEFT, y)
        if rank == 0:
            _calls(c, second, y)
        else:
            c.rect(second, y, 4 * WIDE, 36, fill=SURFACE)
            c.text(second + WIDE, y + 23, "waits", size=11.5, color=MUTED)
    c.text(LEFT + 2 * WIDE, 28, "its shard", size=12, color=INK)
    c.text(second + 2 * WIDE, 28, "the manifest", size=12, color=INK)
    for x in (first, end):
        c.rect(x, 44, GAP, 92, fill=CALL)
        c.text(x + GAP / 2, 28, "exchange", size=11.5, color=MUTED)
    renamed, durable = second + 2 * WIDE, second + 4 * WIDE
    for x in (renamed, durable):
        c.line(x, 36, x, 218, color=LINK_BUSY, thick=1.5, dash="4 3")
    y = 196
    c.text(LEFT, y - 28, "after a crash here", size=11.5, color=MUTED, anchor="start")
    c.text((LEFT + renamed) / 2, y + 12, "the old checkpoint loads", size=12.5)
    c.text((renamed + durable) / 2, y + 12, "old or new", size=12.5)
    c.text(durable + GAP + 20, y + 12, "the new one", size=12.5)
    words = "The old checkpoint is removed at the end, when the new one is durable."
    c.text(LEFT, 250, words, size=11.5, color=MUTED, anchor="start")
    return c.svg()


def _calls(c: Canvas, left: float, y: float) -> None:
    for number, name in enumerate(CALLS):
        x = left + WIDE * number
        c.rect(x + 1, y, WIDE - 2, 36, fill=FORWARD)
        for line, word in enumerate(name.split("_")):
            low = 17 if "_" in name else 22
            c.text(x + WIDE / 2, y + low + 13 * line, word, size=11)


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"commit.svg": commit()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
