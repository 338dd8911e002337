"""What a rank holds; `python -m figures.phase3_sharded_optimizer` writes both figures.

The bars are those of the reference's formula; the curve is worked out layer by layer.
"""

from __future__ import annotations

from pathlib import Path

from distlab.curriculum import load
from distlab.trace.palette import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    INK,
    MUTED,
    NEUTRAL,
    OPTIMIZER_STATE,
    WEIGHTS,
    text_on,
)
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase3_multi_node" / "figures"
RANKS = 8
KINDS = (
    ("weights", 4, WEIGHTS),
    ("gradients", 4, GRADIENTS),
    ("state", 8, OPTIMIZER_STATE),
)
LAYERS = 5
SHARE = 0.25  # of a layer: four ranks


def zero_bars() -> str:
    """Bytes per parameter on one rank, at stages 0 to 3."""
    c = Canvas(
        "zero_bars",
        760,
        300,
        title="ZeRO: bytes per parameter on one of 8 ranks",
        desc=(
            "Four bars, one per stage. Stage 0: weights 4, gradients 4, state 8, "
            "16 bytes in total. Stage 1: the state shrinks to 1, 9 in total. Stage 2: "
            "the gradients shrink to 0.5, 5.5 in total. Stage 3: the weights shrink to "
            "0.5, 2 in total. Beside each bar the units sent per step: 2, 2, 2 and 3."
        ),
    )
    scale, left = 30.0, 110
    bytes_per_rank = load("sharded_optimizer", "reference").bytes_per_rank
    for stage, sent in enumerate((2, 2, 2, 3)):
        top = 52 + 54 * stage
        c.text(40, top + 22, f"stage {stage}", size=13, bold=True, anchor="start")
        x, total = float(left), 0.0
        for kind, (name, size, color) in enumerate(KINDS):
            only = [size if other == kind else 0 for other in range(len(KINDS))]
            held = bytes_per_rank(RANKS, RANKS, stage, only) / RANKS
            c.rect(x, top, held * scale, 34, fill=color, round_=2)
            if held >= 2:
                middle, ink = x + held * scale / 2, text_on(color)
                c.text(middle, top + 22, name, size=12, color=ink)
            x, total = x + held * scale, total + held
        c.text(x + 10, top + 22, f"{total:g} bytes", size=13, anchor="start")
        c.text(722, top + 22, f"sent: {sent}", size=12.5, color=MUTED, anchor="end")
    c.text(
        left,
        32,
        "bytes per parameter on a rank, float32 and AdamW, n = 8 ranks",
        size=13,
        anchor="start",
    )
    c.text(
        40,
        282,
        "sent: per rank and step, in units of (n - 1) / n · N, N elements in the model",
        size=11.5,
        color=MUTED,
        anchor="start",
    )
    return c.svg()


def zero_layers() -> str:
    """Weights on a rank over a forward and a backward, with one layer at a time."""
    c = Canvas(
        "zero_layers",
        760,
        300,
        title="Stage 3: unshard a layer, compute, reshard it",
        desc=(
            "Memory for weights on one of four ranks over time. At the bottom a "
            "constant band: the shards, a quarter of all five layers. On top of it one "
            "full layer at a time: layer 0, 1, 2, 3, 4 in forward, then 4, 3, 2, 1, 0 "
            "in backward. A dashed line high above: the full model."
        ),
    )
    left, bottom, unit = 60, 240, 34.0
    width = 62.0
    shards = LAYERS * SHARE * unit
    order = [*range(LAYERS), *reversed(range(LAYERS))]
    end = left + width * len(order)
    c.rect(left, bottom - shards, end - left, shards, fill=NEUTRAL)
    c.text(
        left + 10,
        bottom - shards / 2 + 4,
        "shards of all layers",
        size=12,
        anchor="start",
    )
    for place, layer in enumerate(order):
        x = left + width * place
        color = FORWARD if place < LAYERS else BACKWARD
        c.rect(x + 6, bottom - shards - unit, width - 12, unit, fill=color, round_=2)
        c.text(
            x + width / 2, bottom - shards - unit / 2 + 4, f"layer {layer}", size=11.5
        )
    whole = bottom - LAYERS * unit
    c.line(left, whole, end, whole, color=MUTED, dash="5 4", thick=1)
    c.text(
        end, whole - 6, "the full model, as at stages 0 to 2", size=11.5, anchor="end"
    )
    c.line(left, bottom, end, bottom, color=INK, thick=1)
    half = left + width * LAYERS
    c.text(
        (left + half) / 2, bottom + 20, "forward: unshard, compute, reshard", size=12
    )
    c.text(
        (half + end) / 2,
        bottom + 20,
        "backward: unshard, compute, reduce-scatter, reshard",
        size=12,
    )
    c.text(left, 32, "weights on one of 4 ranks", size=13, anchor="start")
    c.text(left, 286, "time →", size=11.5, color=MUTED, anchor="start")
    return c.svg()


def figures() -> dict[str, str]:
    """Each picture under its file name."""
    return {"zero_bars.svg": zero_bars(), "zero_layers.svg": zero_layers()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
