"""The weight of each sample in a step; `python -m figures.phase4_trainer` draws it."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import torch

from distlab.trace.palette import (
    COMPLETE_TEXT,
    FAILURE_TEXT,
    INK,
    MUTED,
    RANK_COLORS,
)
from figures.draw import Canvas, write

FOLDER = Path(__file__).resolve().parent.parent / "phase4_production" / "figures"
SAMPLES, K = (5, 6, 7), 3  # of each rank, and the microbatches of a step
LEFT, WIDE, GAP, SPACE = 60.0, 28.0, 8.0, 26.0
UNIT = 900.0  # pixels for a weight of 1


def microbatches(samples: int) -> list[int]:
    """The sizes that `tensor_split` gives."""
    return [len(part) for part in torch.zeros(samples).tensor_split(K)]


def weights(of_mean: Callable[[int], Fraction]) -> list[list[list[Fraction]]]:
    """The weight of each sample, by rank and microbatch, if means have `of_mean`."""
    return [
        [[of_mean(m) / m / len(SAMPLES)] * m for m in microbatches(samples)]
        for samples in SAMPLES
    ]


def sample_weights() -> str:
    """Draw a bar for each sample: all equal with m · n / N, unequal with 1 / K."""
    total, ranks = sum(SAMPLES), len(SAMPLES)
    right = weights(lambda m: Fraction(m * ranks, total))
    wrong = weights(lambda m: Fraction(1, K))
    flat = [w for rank in wrong for batch in rank for w in batch]
    c = Canvas(
        "sample-weights",
        760,
        366,
        title="How much each sample counts, for two weights of a microbatch's loss",
        desc=(
            f"{total} samples on three ranks, which have {SAMPLES[0]}, {SAMPLES[1]} "
            f"and {SAMPLES[2]}, each split into {K} microbatches; a bar is the weight "
            "of a sample in the mean gradient. Above, the loss of a microbatch of m "
            f"samples is weighted with m · n / N: all bars are 1/{total}. Below, it is "
            f"weighted with 1/K: the bars are between {min(flat)} and {max(flat)}. The "
            "largest is the one sample in the last microbatch of rank 0."
        ),
    )
    for base, above, rows, words, ink in (
        (112.0, 84, right, "weight m · n / N: every sample counts 1/18", COMPLETE_TEXT),
        (304.0, 130, wrong, "weight 1 / K: a sample alone counts most", FAILURE_TEXT),
    ):
        c.text(LEFT, base - above, words, size=13, bold=True, color=ink, anchor="start")
        x = LEFT
        for rank, batches in enumerate(rows):
            first = x
            for batch in batches:
                start = x
                for weight in batch:
                    tall = UNIT * float(weight)
                    c.rect(x, base - tall, WIDE - 3, tall, fill=RANK_COLORS[rank])
                    x += WIDE
                middle = (start + x - 3) / 2
                high = base - UNIT * float(batch[0]) - 6
                c.text(middle, high, str(batch[0]), size=11.5)
                c.line(start, base + 5, x - 3, base + 5, color=INK, thick=2)
                x += GAP
            middle = (first + x - GAP - 3) / 2
            c.text(middle, base + 24, f"rank {rank}", size=12.5)
            x += SPACE - GAP
    words = (
        "a bar: one sample; a line under bars: one microbatch; "
        "n = 3 ranks, N = 18, K = 3"
    )
    c.text(LEFT, 350, words, size=11.5, color=MUTED, anchor="start")
    return c.svg()


def figures() -> dict[str, str]:
    """Map each file name to its picture."""
    return {"sample_weights.svg": sample_weights()}


if __name__ == "__main__":
    for path in write(figures(), FOLDER):
        print(path.relative_to(FOLDER.parent.parent))
