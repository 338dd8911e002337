"""How long recoveries took, kill by kill; `python -m figures.phase4_recovery_times`.

It was measured with `python benchmarks/recovery.py --save figures/recovery.json`.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from distlab.trace.palette import (
    CALL,
    FAILURE,
    FORWARD,
    GRID,
    LINK_BUSY,
    MUTED,
    WEIGHTS,
)
from figures.draw import Canvas, write

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "phase4_production" / "figures"
MEASURED = HERE / "recovery.json"
SEGMENTS = (
    ("detect: the survivors lose their peer", FAILURE),
    ("teardown: all processes have joined", CALL),
    ("rendezvous: they are connected", LINK_BUSY),
    ("restore: all have the state", WEIGHTS),
    ("first step, by all ranks", FORWARD),
)
LEFT, BASE, PER_MS, BAR, GAP = 64, 330, 2.0, 13, 5
LINES_MS = (0, 40, 80, 120)


def times() -> str:
    """A stacked bar for each kill, the shortest recovery first."""
    found = json.loads(MEASURED.read_text())
    kills = sorted(found["ours"])
    own_s = statistics.median(kill[0] for kill in kills)
    torchrun_s = statistics.median(found["torchrun"])
    c = Canvas(
        "recovery_times",
        760,
        372,
        title=f"{len(kills)} recoveries from SIGKILL, by segment",
        desc=(
            f"A bar for each of {len(kills)} kills, in order of the seconds from the "
            "signal to the next optimizer step by all ranks. Each bar is divided into "
            "detection, teardown, rendezvous, restore and the first step. The median "
            f"is {own_s * 1000:.0f} ms, the longest {kills[-1][0] * 1000:.0f} ms. "
            f"With torchrun the median is {torchrun_s:.1f} s."
        ),
    )
    right = LEFT + len(kills) * (BAR + GAP)
    for at_ms in LINES_MS:
        y = BASE - PER_MS * at_ms
        c.line(LEFT, y, right, y, color=GRID)
        c.text(LEFT - 8, y + 4, f"{at_ms} ms", size=11.5, color=MUTED, anchor="end")
    for place, (_, *parts) in enumerate(kills):
        x, y = LEFT + GAP / 2 + place * (BAR + GAP), float(BASE)
        for part_s, (_, color) in zip(parts, SEGMENTS, strict=True):
            y -= PER_MS * 1000 * part_s
            c.rect(x, y, BAR, PER_MS * 1000 * part_s, fill=color)
    for place, (word, color) in enumerate(reversed(SEGMENTS)):
        x, y = LEFT + 330 * (place // 3), 16 + 20 * (place % 3)
        c.rect(x, y, 13, 13, fill=color)
        c.text(x + 20, y + 11, word, size=12, anchor="start")
    c.text(
        LEFT,
        BASE + 26,
        f"Median {own_s * 1000:.0f} ms. The same script under torchrun --max-restarts: "
        f"median {torchrun_s:.1f} s of {len(found['torchrun'])} kills.",
        size=12,
        anchor="start",
    )
    return c.svg()


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"recovery_times.svg": times()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
