"""Clipped training in this one process, right and with known mistakes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from distlab.grading.checks.microbatches import (
    LEVEL,
    Means,
    make_model,
    means_of,
    weights_of,
)
from distlab.grading.oracles import Suspect, same_everywhere

LEARNING_RATE = 0.2
# The first gradient is shorter than its limit, all others are longer. The last limit
# is large enough to leave single parameters alone.
MAX_NORMS = (50.0, 0.1, 0.2, 0.4)

Rule = Callable[[Means, float], list[Tensor]]
"""`(the step's gradients, max_norm)` → the gradient with which each rank steps."""


def clipped(gradient: Tensor, max_norm: float) -> Tensor:
    """The same direction, at most this long."""
    norm = float(gradient.norm())
    return gradient * (max_norm / norm) if norm > max_norm else gradient


def train(seed: int, n: int, rule: Rule) -> tuple[list[Tensor], list[Means]]:
    """Each rank's weights at the end, and what rank 0 met in each step."""
    models = [make_model(seed) for _ in range(n)]
    met = []
    for step, max_norm in enumerate(MAX_NORMS):
        met.append(means_of(models[0], seed, step, LEVEL[:n]))
        for model, change in zip(models, rule(met[-1], max_norm), strict=True):
            flat = weights_of(model) - LEARNING_RATE * change
            torch.nn.utils.vector_to_parameters(flat, model.parameters())
    return [weights_of(model) for model in models], met


def right(means: Means, max_norm: float) -> list[Tensor]:
    """One process: the mean of all samples, clipped once."""
    return same_everywhere(clipped(means.mean(), max_norm), len(means.sizes))


@lru_cache(maxsize=32)
def _right(seed: int, n: int) -> tuple[list[Tensor], list[Means]]:
    return train(seed, n, right)


def right_training(seed: int, n: int) -> list[Tensor]:
    """The weights at the end."""
    return _right(seed, n)[0]


def norms_of(seed: int, n: int) -> Tensor:
    """The norm before clipping, step by step."""
    return torch.stack([means.mean().norm() for means in _right(seed, n)[1]])


def wrong_trainings(seed: int, n: int) -> list[Suspect]:
    """What known mistakes lead to."""
    after = (
        "clip what all ranks have together: after accumulating, after the all_reduce"
    )
    guesses: list[tuple[str, str, str, Callable[[Means, float], Tensor]]] = [
        (
            "never-clipped",
            "the steps were as long as the gradients: not clipped before the step",
            "clip in place, before optimizer.step()",
            lambda means, limit: means.mean(),
        ),
        (
            "clip-always-scales",
            "gradients that were short enough were made longer, to max_norm",
            "only a gradient longer than max_norm is changed",
            lambda means, limit: means.mean() * (limit / float(means.mean().norm())),
        ),
        (
            "clip-per-parameter",
            "every parameter's gradient was clipped by its own norm: the direction of "
            "the step is another one",
            "one norm over all gradients, one factor for all",
            _per_parameter,
        ),
        (
            "clip-before-averaging",
            "each rank clipped its own part, and the clipped parts were added up",
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
            "each microbatch's gradient was clipped by itself",
            after,
            _each,
        ),
        (
            "norm-over-ranks",
            f"the gradients were clipped as if their norm were √{n} times as large: "
            f"its square was added up over the {n} ranks",
            "after the all_reduce every rank has the whole gradient, and its norm",
            lambda means, limit: clipped(means.mean(), limit / n**0.5),
        ),
        (
            "",
            "the single numbers were clipped, not the norm: the direction of the step "
            "is another one",
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
    """What other numbers there are."""
    steps = _right(seed, n)[1][:count]
    norms = norms_of(seed, n)[:count]
    limits = torch.tensor(MAX_NORMS[:count], dtype=torch.float64)
    own = [torch.stack([m.parts()[rank].norm() for m in steps]) for rank in range(n)]
    everywhere = [
        (
            "norm-after-clipping",
            torch.minimum(norms, limits),
            "the returned norm is that after clipping",
        ),
        ("", norms.square(), "the returned number is the square of the norm"),
        (
            "norms-added-up",
            torch.stack([_sum(_norms(m.mean())) for m in steps]),
            "the returned number is the sum of the parameters' norms: of norms it is "
            "the squares that add up",
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
            f"was added up over the {n} ranks",
        ),
        ("", norms * n, f"the returned norm is {n} times that of the mean gradient"),
    ]
    found = [
        Suspect(slug=slug, values=same_everywhere(value, n), sentence=sentence)
        for slug, value, sentence in everywhere
    ]
    found.append(
        Suspect(
            slug="norm-of-own-part",
            values=own,
            sentence="every rank returned the norm of its own part of the gradient",
            rule="the norm of the gradient that all ranks have together",
        )
    )
    return found


def _everywhere(rule: Callable[[Means, float], Tensor]) -> Rule:
    return lambda means, limit: same_everywhere(rule(means, limit), len(means.sizes))


def _sum(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).sum(0)


def _split(gradient: Tensor) -> list[Tensor]:
    sizes = [p.numel() for p in make_model(0).parameters()]
    return list(gradient.split(sizes))


def _norms(gradient: Tensor) -> list[Tensor]:
    return [part.norm() for part in _split(gradient)]


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
