"""A mesh of three dimensions on four nodes; `python -m figures.phase2_nodes`.

Tensor parallel ranks are numbered first, then replicas, then stages.
"""

from __future__ import annotations

from itertools import product

from distlab.trace.palette import (
    DATA_PARALLEL,
    MUTED,
    NEUTRAL,
    PIPELINE_PARALLEL,
    SURFACE,
    TENSOR_PARALLEL,
)
from figures.draw import Canvas, write
from figures.phase2_memory import FOLDER

SHARDS, REPLICAS, STAGES = 4, 2, 2
LEFT, TOP, WIDE, TALL, RIGHT, DOWN = 96.0, 64.0, 256.0, 84.0, 352.0, 146.0


def rank_of(stage: int, replica: int, shard: int) -> int:
    """The rank at a place of the mesh."""
    return shard + SHARDS * (replica + REPLICAS * stage)


def on_nodes() -> str:
    """Draw a node for each stage of each replica, and who talks to whom."""
    rows = [
        f"node {rank // SHARDS} has ranks {rank} to {rank + SHARDS - 1}, stage {stage} "
        f"of replica {replica}"
        for stage, replica in product(range(STAGES), range(REPLICAS))
        for rank in [rank_of(stage, replica, 0)]
    ]
    c = Canvas(
        "mesh-on-nodes",
        760,
        412,
        title="Sixteen ranks as a mesh of 4 × 2 × 2, on four nodes",
        desc=(
            f"Four nodes of four ranks: {'; '.join(rows)}. The four ranks of a node "
            "are the four tensor parallel shards of a stage, and send in every layer. "
            "Nodes beside each other are the two stages of one replica: each rank "
            "sends its activations to the rank of the same shard in the next stage. "
            "Nodes above each other have the same stage: each rank all-reduces its "
            "gradients with the rank of the same shard, once per step."
        ),
    )
    for stage in range(STAGES):
        x = LEFT + RIGHT * stage
        c.text(x + WIDE / 2, 34, f"pipeline stage {stage}", size=13, bold=True)
    for replica in range(REPLICAS):
        y = TOP + DOWN * replica
        c.text(14, y + 38, "replica", size=13, bold=True, anchor="start")
        c.text(14, y + 56, str(replica), size=13, bold=True, anchor="start")
        for stage in range(STAGES):
            _node(c, LEFT + RIGHT * stage, y, stage, replica)
        middle = y + TALL / 2
        for shift in (-18, -6, 6, 18):
            start, end = LEFT + WIDE + 4, LEFT + RIGHT - 4
            c.arrow(start, middle + shift, end, middle + shift,
                    color=PIPELINE_PARALLEL, thick=2)  # fmt: skip
    for stage in range(STAGES):
        for shard in range(SHARDS):
            x = LEFT + RIGHT * stage + 38 + 60 * shard
            c.line(x, TOP + TALL + 4, x, TOP + DOWN - 4, color=DATA_PARALLEL, thick=3,
                   dash="6 4")  # fmt: skip
    _legend(c)
    return c.svg()


def _legend(c: Canvas) -> None:
    """Say who talks to whom, and how often."""
    for row, (color, dash, name, words) in enumerate(
        (
            (TENSOR_PARALLEL, "", "tensor parallel", "in a node, in every layer"),
            (PIPELINE_PARALLEL, "", "pipeline parallel",
             "between nodes, once per microbatch and direction"),
            (DATA_PARALLEL, "6 4", "data parallel", "between nodes, once per step"),
        )
    ):  # fmt: skip
        y = 334 + 25 * row
        if color == TENSOR_PARALLEL:
            c.rect(LEFT, y - 12, 34, 16, stroke=color, thick=3, round_=6)
        elif dash:
            c.line(LEFT, y - 4, LEFT + 34, y - 4, color=color, thick=3, dash=dash)
        else:
            c.arrow(LEFT, y - 4, LEFT + 34, y - 4, color=color)
        c.text(LEFT + 46, y, name, size=12.5, bold=True, anchor="start")
        c.text(LEFT + 186, y, words, size=12.5, anchor="start")


def _node(c: Canvas, x: float, y: float, stage: int, replica: int) -> None:
    c.rect(x, y, WIDE, TALL, fill=SURFACE, thick=1.5, round_=8)
    ranks = [rank_of(stage, replica, shard) for shard in range(SHARDS)]
    c.text(x + 10, y + 18, f"node {ranks[0] // SHARDS}", size=11.5, color=MUTED,
           anchor="start")  # fmt: skip
    c.rect(x + 10, y + 26, WIDE - 20, 50, stroke=TENSOR_PARALLEL, thick=3, round_=16)
    for shard, rank in enumerate(ranks):
        middle = x + 38 + 60 * shard
        c.circle(middle, y + 51, 19, fill=NEUTRAL)
        c.text(middle, y + 56, str(rank), size=13, bold=True)


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"mesh_on_nodes.svg": on_nodes()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
