"""A node with eight GPUs, and the rails to the next; `python -m figures.phase3_node`.

The numbers are those of a DGX H100: NVLink 900 GB/s and a NIC 2 · 400 Gb/s for a GPU,
both directions together.
"""

from __future__ import annotations

from distlab.trace.palette import (
    HIGHLIGHT,
    INK,
    LINK_BUSY,
    MUTED,
    NEUTRAL,
    RANK_COLORS,
    SURFACE,
)
from figures.draw import Canvas, write
from figures.phase3_topology import FOLDER

GPUS, SWITCHES = 8, 4
NVLINK_GB_S, NIC_GB_S = 450, 50  # in one direction
LEFT, STEP, WIDE = 128.0, 70.0, 56.0


def node() -> str:
    """One node in full, the leaf switches of its rails, and the edge of a second."""
    c = Canvas(
        "node",
        760,
        500,
        title="A node with eight H100 GPUs, and the rails to the next node",
        desc=(
            "At the top node 0, a DGX H100: four NVSwitches, each connected to all "
            "eight GPUs. "
            f"Through them a GPU sends {NVLINK_GB_S} GB/s to any other GPU of the "
            "node. Under each GPU is its own NIC, which sends 400 Gb/s, that is "
            f"{NIC_GB_S} GB/s. Under each NIC is a leaf switch, one for each rail: NIC "
            "0 of every node is connected to leaf switch 0, NIC 1 to leaf switch 1, "
            "and so on. At the bottom node 1, with its NICs and GPUs in the same order."
        ),
    )
    end = LEFT + STEP * (GPUS - 1) + WIDE
    c.rect(LEFT - 14, 20, end - LEFT + 28, 250, fill=SURFACE, thick=2, round_=10)
    c.rect(LEFT - 14, 386, end - LEFT + 28, 96, fill=SURFACE, thick=2, round_=10)
    for y, words, below in (
        (30, "node 0", "DGX H100"),
        (400, "node 1", ""),
    ):
        c.text(14, y + 14, words, size=13, bold=True, anchor="start")
        c.text(14, y + 31, below, size=11.5, color=MUTED, anchor="start")
    switches = [LEFT + 36 + 125.0 * number for number in range(SWITCHES)]
    middles = [LEFT + STEP * rank + WIDE / 2 for rank in range(GPUS)]
    for x in switches:
        for middle in middles:
            c.line(x + 48, 66, middle, 152, color=LINK_BUSY, thick=0.9)
    for number, x in enumerate(switches):
        c.rect(x, 34, 96, 32, fill=NEUTRAL, thick=1.5, round_=5)
        c.text(x + 48, 55, f"NVSwitch {number}", size=12)
    for rank, middle in enumerate(middles):
        color = RANK_COLORS[rank % len(RANK_COLORS)]
        _box(c, middle, 152, 36, f"GPU {rank}", color)
        c.line(middle, 188, middle, 218, color=INK, thick=1.5)
        _box(c, middle, 218, 34, f"NIC {rank}", SURFACE)
        c.line(middle, 252, middle, 300, color=color, thick=4)
        _box(c, middle, 300, 42, f"leaf {rank}", color)
        c.line(middle, 342, middle, 394, color=color, thick=4)
        _box(c, middle, 394, 34, f"NIC {rank}", SURFACE)
        c.line(middle, 428, middle, 438, color=INK, thick=1.5)
        _box(c, middle, 438, 36, f"GPU {rank}", color)
    for y, lines, color in (
        (102, ("NVLink:", f"{NVLINK_GB_S} GB/s", "each way,", "for a GPU"), LINK_BUSY),
        (292, ("a rail:", f"{NIC_GB_S} GB/s", "each way,", "for a GPU"), HIGHLIGHT),
    ):
        for row, words in enumerate(lines):
            c.text(14, y + 17 * row, words, size=12, bold=row == 1, color=color,
                   anchor="start")  # fmt: skip
    c.text(end + 20, 206, "PCIe", size=11.5, color=MUTED, anchor="start")
    c.text(end + 20, 317, "leaf", size=11.5, color=MUTED, anchor="start")
    c.text(end + 20, 333, "switches", size=11.5, color=MUTED, anchor="start")
    return c.svg()


def _box(
    c: Canvas, middle: float, y: float, tall: float, words: str, fill: str
) -> None:
    c.rect(middle - WIDE / 2, y, WIDE, tall, fill=fill, thick=1.5, round_=4)
    c.text(middle, y + tall / 2 + 4, words, size=12)


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"node.svg": node()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
