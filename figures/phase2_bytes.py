"""What a rank sends in a step; `python -m figures.phase2_bytes` writes the picture.

The model is that of `figures.phase2_ladder`: the bytes follow from its sizes.
"""

from __future__ import annotations

import math

from distlab.trace.palette import (
    DATA_PARALLEL,
    GRID,
    PIPELINE_PARALLEL,
    SURFACE,
    TENSOR_PARALLEL,
)
from figures.draw import Canvas, write
from figures.phase2_ladder import CONFIG, model, size
from figures.phase2_memory import FOLDER

RANKS = 4
BATCHES = (1, 2, 4, 8, 16, 32, 64)
SIZES = ("1 MB", "10 MB", "100 MB", "1 GB", "10 GB", "100 GB")
WAYS = {  # name, what is sent, and how its line looks
    "data": ("data parallel", "all gradients, once", DATA_PARALLEL, "", -6),
    "tensor": ("tensor parallel", "4 all_reduces per block", TENSOR_PARALLEL, "9 4", 0),
    "pipeline": (
        "pipeline, middle stage",
        "activations forward, gradients back",
        PIPELINE_PARALLEL,
        "2 4",
        8,
    ),
}


def sent(sequences: float) -> dict[str, float]:
    """Bytes that go into messages per step and rank, float32, on RANKS ranks.

    A ring all_reduce sends 2 (n - 1) / n of the tensor. A middle stage sends its
    activations to the next stage, and the gradients of its input to the stage before.
    """
    numbers = sequences * CONFIG.context * CONFIG.dim * 4
    ring = 2 * (RANKS - 1) / RANKS
    return {
        "data": ring * 4 * size(model()),
        "pipeline": 2 * numbers,
        "tensor": ring * 4 * numbers * CONFIG.num_layers,
    }


def crossing() -> float:
    """The sequences per step at which tensor parallelism sends as much as data."""
    one = sent(1)
    return one["data"] / one["tensor"]


def bytes_sent() -> str:
    """Bytes per step against the batch, for three kinds of parallelism."""
    c = Canvas(
        "bytes",
        760,
        440,
        title="Bytes sent per rank and step: data, tensor and pipeline parallel",
        desc=(
            f"Bytes that each of {RANKS} ranks sends in a step, against the sequences "
            "in the batch, on logarithmic axes. Data parallel is a horizontal line at "
            f"{sent(1)['data'] / 1e9:.1f} GB, whatever the batch is. Tensor parallel "
            "rises with the batch and crosses that line at "
            f"{crossing():.0f} sequences. Pipeline parallel rises in parallel to it, "
            f"{sent(1)['tensor'] / sent(1)['pipeline']:.0f} times lower."
        ),
    )
    _axes(c)
    for way, (name, below, color, dash, shift) in WAYS.items():
        ends = [(_across(n), _up(sent(n)[way])) for n in (BATCHES[0], BATCHES[-1])]
        c.line(*ends[0], *ends[1], color=color, thick=3.5, dash=dash)
        y = ends[1][1] + shift
        c.text(540, y, name, bold=True, anchor="start")
        c.text(540, y + 17, below, size=11, anchor="start")
    x, y = _across(crossing()), _up(sent(1)["data"])
    c.circle(x, y, 6, fill=SURFACE)
    c.text(x - 8, y - 12, f"equal at {crossing():.0f}", size=11.5, anchor="end")
    return c.svg()


def _across(batch: float) -> float:
    return 96 + 72 * math.log2(batch)


def _up(count: float) -> float:
    return 370 - 62 * (math.log10(count) - 6)


def _axes(c: Canvas) -> None:
    """The title, the grid and the labels of both axes."""
    for place, words in enumerate(SIZES):
        y = _up(10 ** (6 + place))
        c.line(96, y, 540, y, color=GRID, thick=1)
        c.text(86, y + 4, words, size=11.5, anchor="end")
    for batch in BATCHES:
        c.line(_across(batch), 370, _across(batch), 376)
        c.text(_across(batch), 392, str(batch), size=11.5)
    c.line(96, 370, 540, 370)
    words = f"sequences of {CONFIG.context:,} tokens in the batch"
    c.text(318, 414, f"{words}; both axes are logarithmic", size=12.5)
    c.text(
        96,
        30,
        f"bytes sent per rank and step; {RANKS} ranks, float32, "
        f"{size(model()) / 1e6:.0f} million weights",
        bold=True,
        size=12.5,
        anchor="start",
    )


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"bytes.svg": bytes_sent()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
