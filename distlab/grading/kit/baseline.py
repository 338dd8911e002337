"""Data-parallel training in this one process: what the ranks should arrive at.

And what they arrive at with a known mistake: `train` takes the rule by which a rank
makes its step's gradient out of all ranks' gradients. Everything is float64, and the
steps are those of plain SGD, or of SGD with a bend, see `bent`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from distlab.grading.kit.flat import flat, weights_of

SAMPLES_PER_RANK = 4
STEPS = 3
LEARNING_RATE = 0.2

Rule = Callable[[list[Tensor], int], Tensor]
"""`(gradients of all ranks, rank)` → the gradient with which `rank` takes its step."""


def make_model(seed: int) -> nn.Sequential:
    """A small float64 network; the same seed gives the same weights."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model.double()
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(values * 0.5)
    return model


def make_batch(seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """One rank's share of one global batch: inputs (4, 6) and class numbers (4,)."""
    generator = torch.Generator().manual_seed(seed * 7919 + step * 101 + rank)
    inputs = torch.randn(
        SAMPLES_PER_RANK, 6, generator=generator, dtype=torch.float64
    ) * (1.0 + rank)
    targets = torch.randint(0, 3, (SAMPLES_PER_RANK,), generator=generator)
    return inputs, targets


def bent(gradient: Tensor) -> Tensor:
    """A step that is not proportional to the gradient, as Adam's is not.

    Unlike Adam it does see a gradient that is n times too large; and its mean over
    ranks is not the step along the mean gradient.
    """
    return gradient / (1.0 + gradient.abs())


def mean_gradient(gradients: list[Tensor], rank: int) -> Tensor:
    """The right rule."""
    return torch.stack(gradients).mean(0)


@dataclass(frozen=True)
class TrainingRecord:
    """Each rank's weights after the last step, and all local losses (STEPS, ranks)."""

    weights: list[Tensor]
    losses: Tensor


def train(
    seed: int,
    world_size: int,
    rule: Rule = mean_gradient,
    *,
    zeroed: bool = True,
    with_bend: bool = False,
    average_weights: bool = False,
    make: Callable[[int], nn.Module] = make_model,
) -> TrainingRecord:
    """STEPS steps of all ranks from equal weights.

    `zeroed=False` keeps what a step applied in the gradients of the next one;
    `average_weights` replaces all weights by their mean after each step; `make` makes
    another model, from inputs (N, 6) to scores (N, 3).
    """
    models = [make(seed) for _ in range(world_size)]
    kept = [torch.zeros_like(weights_of(models[0])) for _ in range(world_size)]
    losses = torch.zeros(STEPS, world_size, dtype=torch.float64)
    for step in range(STEPS):
        gradients = []
        for rank, model in enumerate(models):
            inputs, targets = make_batch(seed, step, rank)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            parts = torch.autograd.grad(loss, list(model.parameters()))
            gradients.append(flat(parts) + kept[rank])
            losses[step, rank] = loss.detach()
        for rank, model in enumerate(models):
            applied = rule(gradients, rank)
            if not zeroed:
                kept[rank] = applied
            change = bent(applied) if with_bend else applied
            _set_weights(model, weights_of(model) - LEARNING_RATE * change)
        if average_weights:
            mean = torch.stack([weights_of(model) for model in models]).mean(0)
            for model in models:
                _set_weights(model, mean)
    return TrainingRecord([weights_of(model) for model in models], losses)


@lru_cache(maxsize=32)
def right_training(
    seed: int,
    world_size: int,
    *,
    with_bend: bool = False,
    make: Callable[[int], nn.Module] = make_model,
) -> TrainingRecord:
    """What the ranks should arrive at. Each clause asks for it, at each world size."""
    return train(seed, world_size, with_bend=with_bend, make=make)


def _set_weights(model: nn.Module, weights: Tensor) -> None:
    offset = 0
    for parameter in model.parameters():
        part = weights[offset : offset + parameter.numel()]
        parameter.data.copy_(part.reshape(parameter.shape))
        offset += parameter.numel()
