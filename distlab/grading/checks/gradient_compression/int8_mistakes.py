"""What known mistakes in 4.14 leave in bucket.flat, and what is said of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distlab.grading.checks.gradient_compression.hooked import Mistake
from distlab.grading.checks.gradient_compression.int8_steps import scale_of, wrapped


def guesses(parts: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """What known mistakes leave on each rank in the first step."""
    n, total = len(parts), torch.stack(list(parts)).sum(0)
    shared = scale_of(parts, 127)
    beyond = scale_of(parts, 128 // n)
    overshot = wrapped(sum(wrapped((part / beyond).round()) for part in parts))  # type: ignore[arg-type]
    overflown = wrapped(sum((part / shared).round() for part in parts))  # type: ignore[arg-type]
    fractional = wrapped(sum((p / scale_of(parts, 127 / n)).round() for p in parts))  # type: ignore[arg-type]
    largest = max(float(part.max()) for part in parts) / (127 // n) or 1e-300
    signed = wrapped(sum(wrapped((part / largest).round()) for part in parts))  # type: ignore[arg-type]
    own = [max(scale_of([part], 127 // n), 1e-300) for part in parts]
    summed = sum((part / s).round() for part, s in zip(parts, own, strict=True))
    return {
        "int8-overflow": [overflown * shared] * n,
        "fractional-levels": [fractional * scale_of(parts, 127 / n)] * n,
        "levels-of-128": [overshot * beyond] * n,
        "signed-scale": [signed * largest] * n,
        "own-scale": [summed * s for s in own],  # type: ignore[misc]
        "divided-twice": [total / n] * n,
        "own-gradient-only": list(parts),
    }


_LEVELS = "a rank's numbers may be as large as 127 // world_size"
MISTAKES = {
    "int8-overflow": Mistake(
        "int8-overflow",
        "the sum of the ranks' int8 numbers overflows, expected each rank's numbers to "
        "be at most 127 // world_size",
        _LEVELS,
    ),
    "fractional-levels": Mistake(
        "int8-overflow",
        "a rank's largest number is 127 / world_size rounded up, so the sum overflows, "
        "expected 127 // world_size",
        _LEVELS,
    ),
    "levels-of-128": Mistake(
        "int8-overflow",
        "the ranks' numbers add up to 128, which int8 turns into -128, expected each "
        "rank's numbers to be at most 127 // world_size",
        _LEVELS,
    ),
    "own-scale": Mistake(
        "own-scale",
        "each rank used its own scale, expected one scale for all ranks",
        "all_reduce the scale with ReduceOp.MAX first",
    ),
    "signed-scale": Mistake(
        "",
        "the scale follows from the largest element, expected it to follow from the "
        "largest magnitude, so that negative elements fit into int8",
        "corrected.abs().max()",
    ),
    "divided-twice": Mistake(
        "divided-twice",
        "bucket.flat holds the ranks' mean, expected their sum, which DDP divides "
        "itself",
        "leave the sum in bucket.flat: DDP divides it",
    ),
    "own-gradient-only": Mistake(
        "own-gradient-only",
        "every rank still has its own gradient, expected the ranks' sum",
    ),
}
"""By their names in `guesses`."""
