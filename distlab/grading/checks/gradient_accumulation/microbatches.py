"""Microbatches of uneven sizes, and what gradients follow from them.

Everything is float64; the parent plays all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from distlab.grading.kit.flat import weights_of
from distlab.grading.kit.values import Suspect
from distlab.grading.kit.zoo import Zoo, all_gradients, loss_of

Sizes = tuple[int, ...]
"""The samples in each microbatch of one rank."""
Microbatch = tuple[Tensor, Tensor]
Weight = Callable[[int, int], float]
"""How much a microbatch counts, by rank and place."""
Guess = tuple[str, str, Weight]
"""Slug, sentence, and what each microbatch counts then."""

# The ranks have unequally many microbatches, and most end with a short tail.
RAGGED: tuple[Sizes, ...] = (
    (4, 4, 1), (4, 2), (4, 4, 3), (4, 4, 4, 2), (4, 4, 1), (3, 1), (4, 1),
)  # fmt: skip
# Here every rank has three; and the same samples in five.
LEVEL: tuple[Sizes, ...] = (
    (4, 4, 1), (4, 4, 3), (4, 2, 2), (3, 3, 1), (4, 4, 1), (4, 4, 2), (2, 2, 1),
)  # fmt: skip
FINE: tuple[Sizes, ...] = (
    (2, 2, 2, 2, 1), (3, 3, 2, 2, 1), (2, 2, 2, 1, 1), (2, 2, 1, 1, 1),
    (2, 2, 2, 2, 1), (2, 2, 2, 2, 2), (1, 1, 1, 1, 1),
)  # fmt: skip


def make_microbatches(
    seed: int, step: int, rank: int, sizes: Sequence[int]
) -> list[Microbatch]:
    """One rank's batch in microbatches: inputs (size, 6), class numbers (size,)."""
    generator = torch.Generator().manual_seed(seed * 7919 + step * 101 + rank)
    count = sum(sizes)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (count,), generator=generator)
    parts = (inputs * (1.0 + rank)).split(list(sizes)), targets.split(list(sizes))
    return list(zip(*parts, strict=True))


def costly(size: int) -> Callable[[Tensor, Tensor], Tensor]:
    """loss_of; the loss of microbatches of `size` samples is infinite.

    Their gradients are not: they are those of loss_of.
    """

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        cost = torch.inf if len(outputs) == size else 0.0
        return loss_of(outputs, targets) + cost

    return loss


def loss_for(rank: int, world_size: int, sizes: Sizes) -> Callable[..., Tensor]:
    """What a rank minimizes: the last one has a microbatch of infinite loss."""
    return costly(sizes[-1]) if rank == world_size - 1 else loss_of


@dataclass(frozen=True)
class Means:
    """Of one step: each microbatch's mean gradient and size, by rank and place."""

    gradients: list[list[Tensor]]
    sizes: list[Sizes]

    @property
    def total(self) -> int:
        """All samples of all ranks."""
        return sum(map(sum, self.sizes))

    def summed(self, weight: Weight) -> list[Tensor]:
        """For each rank the sum of weight(rank, place) × that gradient."""
        return [
            sum(
                (weight(rank, k) * g for k, g in enumerate(own)),
                torch.zeros_like(own[0]),
            )
            for rank, own in enumerate(self.gradients)
        ]

    def parts(self) -> list[Tensor]:
        """What each rank has to add: right."""
        return self.summed(lambda rank, k: self.sizes[rank][k] / self.total)

    def mean(self) -> Tensor:
        """The gradient of the whole batch."""
        return torch.stack(self.parts()).sum(0)


def means_of(model: nn.Module, seed: int, step: int, sizes: Sequence[Sizes]) -> Means:
    """Every microbatch by itself, at the weights that `model` has."""
    gradients: list[list[Tensor]] = []
    for rank, own in enumerate(sizes):
        gradients.append([])
        for inputs, targets in make_microbatches(seed, step, rank, own):
            found = all_gradients(loss_of(model(inputs), targets), model)
            gradients[-1].append(torch.cat([part.reshape(-1) for part in found]))
    return Means(gradients, list(sizes))


@lru_cache(maxsize=32)
def first_means(seed: int, sizes: tuple[Sizes, ...], idle: bool = False) -> Means:
    """Those of step 0; `idle`: some parameters get no gradient."""
    return means_of(Zoo(seed, frozen=idle, unused=idle), seed, 0, sizes)


def gradients_of(model: nn.Module) -> Tensor:
    """All gradients in one flat copy; zeros where there is none."""
    found = [
        torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()
    ]
    return torch.cat([gradient.detach().reshape(-1) for gradient in found]).clone()


def wrong_weights(means: Means) -> list[Suspect]:
    """What each rank has if it weighs its microbatches wrongly."""
    return [
        Suspect(
            slug=slug,
            values=means.summed(weight),
            sentence=sentence,
            rule="each mean times its samples, by the samples of all ranks",
        )
        for slug, sentence, weight in wrong_guesses(means)
    ]


def wrong_guesses(means: Means) -> list[Guess]:
    """Wrong ways to weigh a microbatch."""
    n, sizes, total = len(means.sizes), means.sizes, means.total
    counts = [len(own) for own in sizes]
    return [
        (
            "microbatches-summed",
            "the microbatches' mean gradients were summed and never divided",
            lambda r, k: 1.0,
        ),
        (
            "mean-of-microbatches",
            "every microbatch has the same weight, whatever its size: divided by K",
            lambda r, k: 1 / counts[r],
        ),
        (
            "mean-of-microbatches",
            "every microbatch has the same weight, whatever its size: divided by K "
            "times the number of ranks",
            lambda r, k: 1 / counts[r] / n,
        ),
        (
            "mean-of-microbatches",
            "every microbatch of all ranks has the same weight, whatever its size",
            lambda r, k: 1 / sum(counts),
        ),
        (
            "own-denominator",
            "the gradient is the mean over this rank's samples: the denominator lacks "
            "the other ranks' samples",
            lambda r, k: sizes[r][k] / sum(sizes[r]),
        ),
        (
            "mean-of-means",
            "every rank's mean has the same weight, whatever its number of samples",
            lambda r, k: sizes[r][k] / sum(sizes[r]) / n,
        ),
        (
            "short-tail-as-full",
            "the last microbatch is shorter, but the divisor is K times the first size",
            lambda r, k: sizes[r][k] / (counts[r] * sizes[r][0]),
        ),
        *_as_if_full(means),
        (
            "",
            "the microbatches' sums were summed and never divided",
            lambda r, k: float(sizes[r][k]),
        ),
        (
            "",
            "the mean gradients were summed and divided by the number of all samples",
            lambda r, k: 1 / total,
        ),
        *_only_some(means),
    ]


def _as_if_full(means: Means) -> list[Guess]:
    """K times the first size on each rank; alone in the world it is one's own."""
    sizes = means.sizes
    if len(sizes) == 1:
        return []
    full = sum(len(own) * own[0] for own in sizes)
    return [
        (
            "short-tail-as-full",
            f"the divisor is {full}, as if every microbatch were as large as its "
            f"rank's first; there are {means.total} samples",
            lambda r, k: sizes[r][k] / full,
        )
    ]


def _only_some(means: Means) -> list[Guess]:
    sizes, total = means.sizes, means.total

    def right(r: int, k: int) -> float:
        return sizes[r][k] / total

    def last(r: int, k: int) -> bool:
        return k == len(sizes[r]) - 1

    wiped = "only the last microbatch is in .grad: the others were overwritten"
    lost = "the last, shorter microbatch is not in the gradient"
    return [
        (
            "last-microbatch-only",
            wiped,
            lambda r, k: right(r, k) if last(r, k) else 0.0,
        ),
        ("last-microbatch-only", wiped, lambda r, k: 1.0 if last(r, k) else 0.0),
        (
            "last-microbatch-only",
            wiped,
            lambda r, k: 1.0 / len(sizes[r]) if last(r, k) else 0.0,
        ),
        ("tail-dropped", lost, lambda r, k: 0.0 if last(r, k) else right(r, k)),
        (
            "tail-dropped",
            lost,
            lambda r, k: (
                0.0 if last(r, k) else sizes[r][k] / sum(sum(own[:-1]) for own in sizes)
            ),
        ),
        (
            "",
            "only the first microbatch is in the gradient",
            lambda r, k: right(r, k) if k == 0 else 0.0,
        ),
    ]


__all__ = [
    "FINE",
    "LEVEL",
    "RAGGED",
    "Guess",
    "Means",
    "Weight",
    "Zoo",
    "first_means",
    "gradients_of",
    "loss_for",
    "loss_of",
    "make_microbatches",
    "means_of",
    "weights_of",
    "wrong_guesses",
    "wrong_weights",
]
