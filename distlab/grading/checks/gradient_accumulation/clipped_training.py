"""Clipped training in a single process: what the ranks should arrive at."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from distlab.grading.checks.gradient_accumulation.microbatches import (
    LEVEL,
    Means,
    Zoo,
    means_of,
    weights_of,
)
from distlab.grading.kit.again import turned
from distlab.grading.kit.values import same_everywhere

LEARNING_RATE = 0.2
# The first gradient is shorter than its limit, all others are longer. The last limit
# is large enough to leave single parameters alone.
MAX_NORMS = (50.0, 0.1, 0.15, 0.2)


def clipped(gradient: Tensor, max_norm: float) -> Tensor:
    """The same direction, at most this long."""
    norm = float(gradient.norm())
    return gradient * (max_norm / norm) if norm > max_norm else gradient


@lru_cache(maxsize=32)
def _trained(seed: int, n: int) -> tuple[Tensor, list[Means]]:
    """The weights at the end, and the gradients that were met in each step."""
    model, met = Zoo(seed), []
    for step, max_norm in enumerate(MAX_NORMS):
        met.append(means_of(model, seed, step, turned(LEVEL, seed)[:n]))
        change = clipped(met[-1].mean(), max_norm)
        flat = weights_of(model) - LEARNING_RATE * change
        torch.nn.utils.vector_to_parameters(flat, model.parameters())
    return weights_of(model), met


def right_training(seed: int, n: int) -> list[Tensor]:
    """The weights at the end."""
    return same_everywhere(_trained(seed, n)[0], n)


def right_steps(seed: int, n: int) -> list[Tensor]:
    """The gradient of each step, after clipping."""
    met = _trained(seed, n)[1]
    return [clipped(m.mean(), limit) for m, limit in zip(met, MAX_NORMS, strict=True)]


def norms_of(seed: int, n: int) -> Tensor:
    """The norm before clipping, step by step."""
    return torch.stack([means.mean().norm() for means in _trained(seed, n)[1]])
