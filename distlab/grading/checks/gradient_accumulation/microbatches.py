"""Microbatches of uneven sizes, and what gradients follow from them.

Everything is float64; the parent plays all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from distlab.grading.kit import when_raised
from distlab.grading.kit.flat import flat, gradients_of, weights_of
from distlab.grading.kit.zoo import Zoo, all_gradients, loss_of
from distlab.grading.runs import Runs, RunSpec, Scenario
from distlab.runner import Run

Sizes = tuple[int, ...]
"""The samples in each microbatch of one rank."""
Microbatch = tuple[Tensor, Tensor]

# The ranks have unequally many microbatches, and most end with a short tail. Eight bits
# are too few to count the samples of rank 1.
RAGGED: tuple[Sizes, ...] = (
    (4, 4, 1), (300, 2), (4, 4, 3), (4, 4, 4, 2), (4, 4, 1), (3, 1), (4, 1),
)  # fmt: skip
# Here every rank has three; and the same samples in five.
LEVEL: tuple[Sizes, ...] = (
    (4, 4, 1), (4, 4, 3), (4, 2, 2), (3, 3, 1), (4, 4, 1), (4, 4, 2), (2, 2, 1),
)  # fmt: skip
FINE: tuple[Sizes, ...] = (
    (2, 2, 2, 2, 1), (3, 3, 2, 2, 1), (2, 2, 2, 1, 1), (2, 2, 1, 1, 1),
    (2, 2, 2, 2, 1), (2, 2, 2, 2, 2), (1, 1, 1, 1, 1),
)  # fmt: skip
ZEROS = 4


def make_microbatches(
    seed: int, step: int, rank: int, sizes: Sequence[int]
) -> list[Microbatch]:
    """One rank's batch in microbatches: inputs (size, 6), class numbers (size,).

    Those of rank ZEROS are zeros, and so is its gradient of the first weight.
    """
    generator = torch.Generator().manual_seed(seed * 7919 + step * 101 + rank)
    count = sum(sizes)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (count,), generator=generator)
    factor = 0.0 if rank == ZEROS else 1.0 + rank
    parts = (inputs * factor).split(list(sizes)), targets.split(list(sizes))
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

    def parts(self) -> list[Tensor]:
        """What each rank has to add."""
        every = zip(self.gradients, self.sizes, strict=True)
        return [
            torch.tensor(sizes).double() / self.total @ torch.stack(own)
            for own, sizes in every
        ]

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
            gradients[-1].append(flat(found))
    return Means(gradients, list(sizes))


@lru_cache(maxsize=32)
def first_means(seed: int, sizes: tuple[Sizes, ...], idle: bool = False) -> Means:
    """Those of step 0; `idle`: some parameters get no gradient."""
    return means_of(Zoo(seed, frozen=idle, unused=idle), seed, 0, sizes)


def finished(
    runs: Runs,
    spec: Scenario | RunSpec,
    *,
    frozen: bool = False,
    transposed: bool = False,
) -> Run:
    """The record of a run with a Zoo; see kit/when_raised.py."""
    kinds = {"0-dim": "with a parameter of shape [] in the model"}
    if transposed:
        kinds["view size"] = "with a transposed view among the parameters"
    if frozen:
        kinds["does not require grad"] = "with a frozen parameter in the model"
    return when_raised.finished(runs, spec, kinds)


__all__ = [
    "FINE",
    "LEVEL",
    "RAGGED",
    "Means",
    "Zoo",
    "finished",
    "first_means",
    "gradients_of",
    "loss_for",
    "loss_of",
    "make_microbatches",
    "means_of",
    "weights_of",
]
