"""Show how much you lose without error feedback, on a quadratic loss.

Each simulated rank has the loss ½ Σ a_i (x_i - c_i)² with its own targets c. All ranks
have the same curvatures a, so the best x is the mean of the targets.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from distlab.curriculum import load
from distlab.given.gradient_compression import FlatBucket, Residuals
from distlab.runner import RankContext
from distlab.sim import run
from distlab.walkthroughs.phase4_compression_rank import approximate

SIZE, NUM_RANKS, NUM_STEPS, RATE = 100, 4, 500, 0.05


def gaps(code: str, ratio: float) -> tuple[float, float]:
    """Return how far the loss is from the best one, with and without error feedback.

    `code` is mine, reference or a file.
    """
    unit = load("gradient_compression", code)
    found = []
    for forgets in (False, True):
        done = run(
            partial(_descend, unit=unit, ratio=ratio, forgets=forgets), NUM_RANKS
        )
        found.append(float(done.require_finished().values[0]))
    return found[0], found[1]


def low_rank_errors(code: str, columns: int) -> tuple[float, float]:
    """Return the error of PowerSGD's first step and of the mean of 100 steps, in %.

    The gradient stays the same. `code` is mine, reference or a file, and `columns` is
    R.
    """
    unit = load("gradient_compression", code)
    play = partial(approximate, unit=unit, ranks=(columns,), num_steps=100)
    found = run(play, NUM_RANKS).require_finished().values[0][columns]
    return found["step 1"], found["all"]


def _descend(context: RankContext, unit: Any, ratio: float, forgets: bool) -> float:
    generator = torch.Generator().manual_seed(0)
    curvature = torch.rand(SIZE, generator=generator, dtype=torch.float64) + 0.1
    targets = 5 * torch.randn(NUM_RANKS, SIZE, generator=generator, dtype=torch.float64)
    x = torch.zeros(SIZE, dtype=torch.float64)
    hook = unit.TopK(ratio)
    bucket = FlatBucket([x], torch.zeros_like(x))
    for _ in range(NUM_STEPS):
        bucket.flat.copy_(curvature * (x - targets[context.rank]))
        if forgets:
            hook.residuals = Residuals()
        hook(context.comm, bucket).wait()
        x -= RATE * bucket.flat / NUM_RANKS
    return float((curvature * (x - targets.mean(0)) ** 2).sum() / 2)
