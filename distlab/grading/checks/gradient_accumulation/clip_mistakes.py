"""Clipped training in a single process, right and with known mistakes."""

from __future__ import annotations

from collections.abc import Callable
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
from distlab.grading.kit.values import Suspect, same_everywhere
from distlab.grading.kit.zoo import where

LEARNING_RATE = 0.2
# The first gradient is shorter than its limit, all others are longer. The last limit
# is large enough to leave single parameters alone.
MAX_NORMS = (50.0, 0.1, 0.15, 0.2)

NORM = "one norm over all gradients: the square root of the sum of all squares"
Rule = Callable[[Means, float], list[Tensor]]
"""`(the step's gradients, max_norm)` → the gradient with which each rank steps."""


def clipped(gradient: Tensor, max_norm: float) -> Tensor:
    """The same direction, at most this long."""
    norm = float(gradient.norm())
    return gradient * (max_norm / norm) if norm > max_norm else gradient


def train(seed: int, n: int, rule: Rule) -> tuple[list[Tensor], list[Means]]:
    """Each rank's weights at the end, and what rank 0 met in each step."""
    models = [Zoo(seed) for _ in range(n)]
    met = []
    for step, max_norm in enumerate(MAX_NORMS):
        sizes = turned(LEVEL, seed)[:n]
        met.append(means_of(models[0], seed, step, sizes))
        for model, change in zip(models, rule(met[-1], max_norm), strict=True):
            flat = weights_of(model) - LEARNING_RATE * change
            torch.nn.utils.vector_to_parameters(flat, model.parameters())
    return [weights_of(model) for model in models], met


def right(means: Means, max_norm: float) -> list[Tensor]:
    """The single-process baseline: the mean of all samples, clipped once."""
    return same_everywhere(clipped(means.mean(), max_norm), len(means.sizes))


@lru_cache(maxsize=32)
def _right(seed: int, n: int) -> tuple[list[Tensor], list[Means]]:
    return train(seed, n, right)


def right_training(seed: int, n: int) -> list[Tensor]:
    """The weights at the end."""
    return _right(seed, n)[0]


def right_steps(seed: int, n: int) -> list[Tensor]:
    """The gradient of each step, after clipping."""
    met = _right(seed, n)[1]
    return [clipped(m.mean(), limit) for m, limit in zip(met, MAX_NORMS, strict=True)]


def norms_of(seed: int, n: int) -> Tensor:
    """The norm before clipping, step by step."""
    return torch.stack([means.mean().norm() for means in _right(seed, n)[1]])


def wrong_trainings(seed: int, n: int) -> list[Suspect]:
    """What known mistakes lead to."""
    after = "clip the gradient of the global batch: after the all_reduce"
    guesses: list[tuple[str, str, str, Callable[[Means, float], Tensor]]] = [
        (
            "never-clipped",
            "the gradients were not clipped before the step",
            "change every .grad in place, before optimizer.step()",
            lambda means, limit: means.mean(),
        ),
        (
            "clip-always-scales",
            "gradients shorter than max_norm were scaled up to max_norm",
            "scale only a gradient whose norm is larger than max_norm",
            lambda means, limit: means.mean() * (limit / float(means.mean().norm())),
        ),
        (
            "clip-per-parameter",
            "every parameter's gradient was clipped by its own norm: the step has "
            "another direction",
            "one norm over all gradients, one factor for all",
            _per_parameter,
        ),
        (
            "clip-before-averaging",
            "each rank clipped its own gradient before the sum over the ranks",
            after,
            lambda means, limit: _sum([clipped(part, limit) for part in means.parts()]),
        ),
        (
            "clip-every-microbatch",
            "the gradient was clipped after every microbatch",
            after,
            _after_each,
        ),
        (
            "clip-every-microbatch",
            "each microbatch's gradient was clipped separately",
            after,
            _each,
        ),
        (
            "norm-over-ranks",
            f"the gradients were clipped as if their norm were √{n} times as large: "
            f"its square was summed over the {n} ranks",
            "after the all_reduce every rank has the full gradient, and its norm",
            lambda means, limit: clipped(means.mean(), limit / n**0.5),
        ),
        (
            "",
            "the elements were clipped, not the norm: the step has another direction",
            "one norm over all gradients, one factor for all",
            lambda means, limit: means.mean().clamp(-limit, limit),
        ),
    ]
    return [
        Suspect(
            slug=slug,
            values=train(seed, n, _everywhere(rule))[0],
            sentence=sentence,
            rule=advice,
        )
        for slug, sentence, advice, rule in guesses
    ]


def wrong_norms(seed: int, n: int, count: int) -> list[Suspect]:
    """What known mistakes return."""
    steps = _right(seed, n)[1][:count]
    norms = norms_of(seed, n)[:count]
    limits = torch.tensor(MAX_NORMS[:count], dtype=torch.float64)
    own = [torch.stack([m.parts()[rank].norm() for m in steps]) for rank in range(n)]
    everywhere = [
        (
            "norm-after-clipping",
            torch.minimum(norms, limits),
            "the returned norm is the norm after clipping",
        ),
        ("", norms.square(), "the returned number is the square of the norm"),
        (
            "norms-added-up",
            torch.stack([_sum(_norms(m.mean())) for m in steps]),
            "the returned number is the sum of the parameters' norms: add their "
            "squares instead",
        ),
        (
            "",
            torch.stack([torch.stack(_norms(m.mean())).mean() for m in steps]),
            "the returned number is the mean of the parameters' norms",
        ),
        (
            "",
            torch.stack([_with_tied_twice(m.mean()).norm() for m in steps]),
            "in the returned norm the weight that two modules share counts twice",
        ),
        (
            "",
            torch.stack([torch.stack(_norms(m.mean())).amax() for m in steps]),
            "the returned number is the largest of the parameters' norms",
        ),
        (
            "norm-over-ranks",
            norms * n**0.5,
            f"the returned norm is √{n} times that of the mean gradient: its square "
            f"was summed over the {n} ranks",
        ),
        ("", norms * n, f"the returned norm is {n} times that of the mean gradient"),
    ]
    suspects = [
        Suspect(
            slug=slug, values=same_everywhere(value, n), sentence=sentence, rule=NORM
        )
        for slug, value, sentence in everywhere
    ]
    suspects.append(
        Suspect(
            slug="norm-of-own-part",
            values=own,
            sentence="the returned norm is that of each rank's own contribution, not "
            "of the mean gradient",
            rule="the norm of the mean gradient, after the all_reduce",
        )
    )
    return suspects


def _everywhere(rule: Callable[[Means, float], Tensor]) -> Rule:
    return lambda means, limit: same_everywhere(rule(means, limit), len(means.sizes))


def _sum(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def _split(gradient: Tensor) -> list[Tensor]:
    sizes = [p.numel() for p in Zoo(0).parameters()]
    return list(gradient.split(sizes))


def _norms(gradient: Tensor) -> list[Tensor]:
    return [part.norm() for part in _split(gradient)]


def _with_tied_twice(gradient: Tensor) -> Tensor:
    model = Zoo(0)
    return gradient * (1 + where(model, lambda _, p: p is model.mixer.weight)).sqrt()


def _per_parameter(means: Means, limit: float) -> Tensor:
    return torch.cat([clipped(part, limit) for part in _split(means.mean())])


def _after_each(means: Means, limit: float) -> Tensor:
    ranks = []
    for gradients, sizes in zip(means.gradients, means.sizes, strict=True):
        held = torch.zeros_like(gradients[0])
        for gradient, size in zip(gradients, sizes, strict=True):
            held = clipped(held + gradient * (size / means.total), limit)
        ranks.append(held)
    return _sum(ranks)


def _each(means: Means, limit: float) -> Tensor:
    return _sum(
        [
            clipped(gradient, limit) * (size / means.total)
            for own, sizes in zip(means.gradients, means.sizes, strict=True)
            for gradient, size in zip(own, sizes, strict=True)
        ]
    )
