"""What `main` should arrive at, and what it arrives at with a known mistake.

Reckoned in this process with the given helpers of the solution: make_model,
global_batches and LEARNING_RATE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor, nn

from distlab.curriculum import load
from distlab.grading.checks.trainer.gradient_weight_mistakes import PLAIN_MEAN
from distlab.grading.kit.values import Suspect, same_everywhere
from distlab.grading.reference import weights_of
from distlab.grading.threads import one_thread

Share = Callable[[Tensor, int], Sequence[Tensor]]
"""`(places in a batch, ranks)` → each rank's places."""

Rule = Callable[[list[Tensor], list[int], int], Tensor]
"""`(each rank's mean gradient, its samples, rank)` → with what the rank steps."""


def _every_nth(places: Tensor, world_size: int) -> Sequence[Tensor]:
    return [places[rank::world_size] for rank in range(world_size)]


def _chunks(places: Tensor, world_size: int) -> Sequence[Tensor]:
    return places.tensor_split(world_size)


def _rounded_down(places: Tensor, world_size: int) -> Sequence[Tensor]:
    size = len(places) // world_size
    return [places[rank * size :][:size] for rank in range(world_size)]


@lru_cache(maxsize=1)
def given() -> ModuleType:
    """The unit as the solution has it; of use here are its helpers."""
    return load("trainer", "reference")


@lru_cache(maxsize=16)
def right_weights(num_epochs: int) -> Tensor:
    """The weights of one process, end to end."""
    return trained(num_epochs, 1, lambda gradients, counts, rank: gradients[0])[0]


def first_weights() -> Tensor:
    """The weights before the first step."""
    return weights_of(given().make_model(seed=0))


@one_thread()
def trained(
    num_epochs: int,
    world_size: int,
    rule: Rule,
    *,
    share: Share = _every_nth,
    own_models: bool = False,
) -> list[Tensor]:
    """Each rank's weights at the end; with `own_models` the rank is the seed."""
    unit = given()
    models = [unit.make_model(seed=own_models * r) for r in range(world_size)]
    for epoch in range(num_epochs):
        for inputs, targets in unit.global_batches(epoch):
            shares = share(torch.arange(len(inputs)), world_size)
            counts = [len(share) for share in shares]
            gradients = [
                _gradient(model, inputs[share], targets[share])
                for model, share in zip(models, shares, strict=True)
            ]
            for rank, model in enumerate(models):
                _step(model, rule(gradients, counts, rank) * unit.LEARNING_RATE)
    return [weights_of(model) for model in models]


def suspects_of(num_epochs: int, world_size: int) -> list[Suspect]:
    """What known mistakes lead to, for either way of sharing a batch."""
    n = world_size
    rules: list[tuple[str, str, Rule]] = [
        ("mean-of-means", PLAIN_MEAN, _plain),
        ("sum-not-mean", "the ranks' mean gradients were summed without weights", _sum),
        (
            "divided-twice",
            f"the gradient is 1/{n} of the expected gradient: divided by the global "
            "batch's samples, and by the number of ranks",
            lambda g, c, rank: _weighted(g, c) / n,
        ),
        (
            "sum-not-mean",
            "the gradient is the sum over the batch: never divided",
            lambda g, c, rank: _weighted(g, c) * sum(c),
        ),
        (
            "own-gradient-only",
            "each rank stepped with its own mean gradient",
            lambda g, c, rank: g[rank],
        ),
        (
            "own-gradient-only",
            "each rank stepped with its weighted gradient: it was never summed",
            lambda g, c, rank: g[rank] * c[rank] / sum(c),
        ),
    ]
    found = [
        Suspect(
            slug=slug,
            values=trained(num_epochs, n, rule, share=share),
            sentence=sentence,
            rule="each rank's sum over its samples / the samples of the global batch",
        )
        for slug, sentence, rule in rules
        for share in (_every_nth, _chunks)
    ]
    found += [
        Suspect(
            slug="remainder-lost",
            values=trained(num_epochs, n, rule, share=_rounded_down),
            sentence=f"each batch was split into {n} blocks of a size rounded down: "
            "the remainder was read by no rank",
            rule="every sample of a batch belongs to a rank: 100 samples on 3 ranks",
        )
        for rule in (_plain, lambda g, c, rank: _weighted(g, c))
    ]
    found += [
        Suspect(
            slug="unequal-start",
            values=trained(
                num_epochs,
                n,
                lambda g, c, rank: _weighted(g, c),
                share=share,
                own_models=True,
            ),
            sentence="every rank made a different model, with its rank as the seed: "
            "equal steps keep the models apart",
            rule="make_model(seed=0) on every rank",
        )
        for share in (_every_nth, _chunks)
    ]
    same_order = _always_epoch(0, num_epochs)
    return [
        *found,
        Suspect(
            slug="epoch-not-set",
            values=same_everywhere(same_order, n),
            sentence="every epoch went through the batches of epoch 0",
            rule="global_batches(epoch): another order in each epoch",
        ),
        Suspect(
            slug="",
            values=same_everywhere(first_weights(), n),
            sentence="the weights are those that make_model gives: no step was taken",
            rule="num_epochs times through global_batches, a step for each batch",
        ),
    ]


@one_thread()
def _always_epoch(epoch: int, times: int) -> Tensor:
    unit = given()
    model = unit.make_model(seed=0)
    for _ in range(times):
        for inputs, targets in unit.global_batches(epoch):
            _step(model, _gradient(model, inputs, targets) * unit.LEARNING_RATE)
    return weights_of(model)


def _gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(inputs), targets)
    parts = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([part.reshape(-1) for part in parts])


def _step(model: nn.Module, change: Tensor) -> None:
    sizes = [p.numel() for p in model.parameters()]
    for parameter, part in zip(model.parameters(), change.split(sizes), strict=True):
        parameter.data -= part.reshape(parameter.shape)


def _weighted(gradients: list[Tensor], counts: list[int]) -> Tensor:
    parts = [g * c for g, c in zip(gradients, counts, strict=True)]
    return torch.stack(parts).sum(0) / sum(counts)


def _plain(gradients: list[Tensor], counts: list[int], rank: int) -> Tensor:
    return torch.stack(gradients).mean(0)


def _sum(gradients: list[Tensor], counts: list[int], rank: int) -> Tensor:
    return torch.stack(gradients).sum(0)
