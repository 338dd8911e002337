"""What `main` should arrive at, and what it arrives at with a known mistake.

Reckoned in this process with the given helpers of the solution: make_model,
global_batches and LEARNING_RATE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor, nn

from distlab.curriculum import load
from distlab.grading.kit.flat import flat, weights_of
from distlab.grading.kit.nodes import local_rank
from distlab.grading.kit.values import Suspect, close, same_everywhere
from distlab.grading.threads import one_thread

BATCH = 100  # samples of every batch but the last
SAMPLES = 297  # the last batch has 97, as that of the whole set

Share = Callable[[Tensor, int], Sequence[Tensor]]
"""`(places in a batch, ranks)` → each rank's places."""

Rule = Callable[[list[Tensor], list[int], int], Tensor]
"""`(each rank's mean gradient, its samples, rank)` → with what the rank steps."""

PLAIN_MEAN = "the ranks' mean gradients were averaged without weights, expected each "
PLAIN_MEAN += "weighted by its rank's number of samples"


def _every_nth(places: Tensor, world_size: int) -> Sequence[Tensor]:
    return [places[rank::world_size] for rank in range(world_size)]


def _chunks(places: Tensor, world_size: int) -> Sequence[Tensor]:
    return places.tensor_split(world_size)


def _rounded_down(places: Tensor, world_size: int) -> Sequence[Tensor]:
    size = len(places) // world_size
    return [places[rank * size :][:size] for rank in range(world_size)]


def _local_nth(places: Tensor, world_size: int) -> Sequence[Tensor]:
    ranks = range(world_size)
    return [places[local_rank(rank, world_size) :: world_size] for rank in ranks]


def _local_chunks(places: Tensor, world_size: int) -> Sequence[Tensor]:
    chunks = _chunks(places, world_size)
    return [chunks[local_rank(rank, world_size)] for rank in range(world_size)]


@lru_cache(maxsize=2)
def given(whole: bool = False) -> ModuleType:
    """The unit as the solution has it; of use here are its helpers."""
    unit = load("trainer", "reference")
    if not whole:
        keep_few_samples(unit)
    return unit


def keep_few_samples(unit: ModuleType) -> None:
    """Leave three of an epoch's eighteen batches: many ranks take long for a step."""
    digits = unit._digits
    unit._digits = lambda: tuple(t[:SAMPLES] for t in digits())  # type: ignore[attr-defined]


# Steps that are a hundred times too large make a training chaotic, and how much of a
# rounding error is left at the end depends on the processor. The first step tells the
# mistakes apart already.
UNSTABLE = 1e-6


@lru_cache(maxsize=16)
def right_weights(num_epochs: int, whole: bool = False) -> Tensor:
    """The weights of one process, end to end; of few samples, or of the whole set."""
    return trained(num_epochs, 1, whole=whole)[0]


def first_weights() -> Tensor:
    """The weights before the first step."""
    return weights_of(given().make_model(seed=0))


@dataclass(frozen=True, kw_only=True)
class WrongTraining:
    """How the ranks train, if not rightly; as it stands here it is right."""

    rule: Rule = lambda gradients, counts, rank: _weighted(gradients, counts)
    share: Share = _every_nth
    own_models: bool = False  # a model's seed is its rank
    of_batch: bool = False  # divided by the batch's samples, whoever read how many
    full_batches: bool = False  # the last, smaller batch is left out


RIGHT = WrongTraining()


@one_thread()
def trained(
    num_epochs: int,
    world_size: int,
    how: WrongTraining = RIGHT,
    first: Sequence[Tensor | None] = (),
    whole: bool = False,
) -> list[Tensor]:
    """Each rank's weights at the end; nothing, if they are not `first` after a step."""
    unit = given(whole)
    models = [unit.make_model(seed=how.own_models * r) for r in range(world_size)]
    num_steps = 0
    for epoch in range(num_epochs):
        for inputs, targets in unit.global_batches(epoch):
            if how.full_batches and len(inputs) < BATCH:
                continue
            shares = how.share(torch.arange(len(inputs)), world_size)
            counts = [len(share) for share in shares]
            gradients = [
                _gradient(model, inputs[share], targets[share])
                for model, share in zip(models, shares, strict=True)
            ]
            scale = sum(counts) / len(inputs) if how.of_batch else 1.0
            for rank, model in enumerate(models):
                applied = how.rule(gradients, counts, rank) * scale
                _step(model, applied * unit.LEARNING_RATE)
            num_steps += 1
            if num_steps == 1 and not _are(models, first):
                return []
    return [weights_of(model) for model in models]


def _are(models: Sequence[nn.Module], first: Sequence[Tensor | None]) -> bool:
    pairs = zip(models, first, strict=False)
    return all(flat is None or close(flat, weights_of(m)) for m, flat in pairs)


def suspects_of(
    num_epochs: int, world_size: int, first: Sequence[Tensor | None]
) -> Iterator[Suspect]:
    """What known mistakes lead to; of those that lead to `first` after one step."""
    for slug, sentence, rule, mistakes in _known(world_size):
        for how in mistakes:
            values = trained(num_epochs, world_size, how, first)
            if values:
                yield Suspect(
                    slug=slug,
                    values=values,
                    sentence=sentence,
                    rule=rule,
                    tolerance=UNSTABLE,
                )
    if num_epochs > 1:
        yield Suspect(
            slug="epoch-not-set",
            values=same_everywhere(_always_epoch(0, num_epochs), world_size),
            sentence="every epoch read the batches of epoch 0, expected those of "
            "global_batches(epoch)",
            rule="global_batches(epoch): another order in each epoch",
        )
    yield Suspect(
        slug="",
        values=same_everywhere(first_weights(), world_size),
        sentence="after main, the weights are still those of make_model, expected a "
        "step for each batch",
        rule="num_epochs times through global_batches, a step for each batch",
    )


def _known(n: int) -> Iterator[tuple[str, str, str, list[WrongTraining]]]:
    """Slug, sentence and rule of a mistake, and the ways in which it is made."""
    rules: list[tuple[str, str, Rule]] = [
        ("mean-of-means", PLAIN_MEAN, _plain),
        (
            "sum-not-mean",
            "the ranks' mean gradients were summed without weights, expected each "
            "weighed by its share of the samples",
            _sum,
        ),
        (
            "divided-twice",
            f"each step used 1/{n} of the expected gradient, as if it had been divided "
            f"by the number of ranks, {n}, as well",
            lambda g, c, rank: _weighted(g, c) / n,
        ),
        (
            "sum-not-mean",
            "each step used the sum of the samples' gradients, expected their mean "
            "over the global batch",
            lambda g, c, rank: _weighted(g, c) * sum(c),
        ),
        (
            "own-gradient-only",
            "each rank stepped with its own mean gradient, expected the mean over all "
            "ranks' samples",
            lambda g, c, rank: g[rank],
        ),
        (
            "own-gradient-only",
            "each rank stepped with its own weighted gradient, expected the sum of all "
            "ranks' weighted gradients",
            lambda g, c, rank: g[rank] * c[rank] / sum(c),
        ),
    ]
    of_samples = "each rank's sum over its samples / the samples of the global batch"
    for slug, sentence, rule in rules:
        ways = [
            WrongTraining(rule=rule, share=share) for share in (_every_nth, _chunks)
        ]
        yield slug, sentence, of_samples, ways
    yield (
        "remainder-lost",
        f"each batch was split into {n} blocks of equal size, and no rank read the "
        "remainder, expected every sample to be read",
        "every sample of a batch belongs to a rank: 100 samples on 3 ranks",
        [WrongTraining(rule=_plain, share=_rounded_down), *_either_way(_rounded_down)],
    )
    yield (
        "last-batch-dropped",
        "the last, smaller batch of each epoch was left out, expected a step for it "
        "too",
        "every batch of global_batches(epoch) counts",
        [
            WrongTraining(rule=rule, share=share, full_batches=True)
            for rule in (RIGHT.rule, _plain)
            for share in (_every_nth, _chunks)
        ],
    )
    if n > 1:
        yield (
            "",
            "each rank chose its samples by LOCAL_RANK, so ranks of different machines "
            "read the same ones, expected a choice by RANK",
            "LOCAL_RANK numbers the ranks of one machine, RANK all ranks",
            [
                way
                for share in (_local_nth, _local_chunks)
                for way in (
                    WrongTraining(rule=_plain, share=share),
                    *_either_way(share),
                )
            ],
        )
    yield (
        "unequal-start",
        "each rank made a different model, with its rank as the seed, expected the "
        "model of seed 0 on every rank",
        "make_model(seed=0) on every rank",
        [
            WrongTraining(share=share, own_models=True)
            for share in (_every_nth, _chunks)
        ],
    )


def _either_way(share: Share) -> list[WrongTraining]:
    """Divided by the samples that were read, or by those of the batch."""
    return [WrongTraining(share=share, of_batch=of_batch) for of_batch in (False, True)]


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
    return flat(parts)


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
