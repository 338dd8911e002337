"""What is in .grad after each step, worked out from the buckets of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distlab.grading.checks.compression_port.recorded import (
    ALL,
    INFINITES,
    RATIO,
    SIZES,
    SMALL_RATIO,
)
from distlab.grading.kit.values import brief
from distlab.grading.verdict import NotYetError
from distlab.runner import Run

Keeps = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From corrected, sent (zeros elsewhere) and the ranks' mean of it: the residual."""


def right(corrected: Tensor, sent: Tensor, mean: Tensor) -> Tensor:
    """What was not sent; nothing of an infinite one, sent or not."""
    return corrected.masked_fill((sent != 0) | ~corrected.isfinite(), 0)


@dataclass(frozen=True, kw_only=True)
class Way:
    """What a hook does; as it is, what is right."""

    keeps: Keeps = right
    by_index: bool = False  # a residual for each bucket
    by_number: bool = False  # a residual for each parameter's number, of all models
    overwrites: bool = False  # values of the same index are not added
    threshold: bool = False  # the first k that reach the k-th magnitude are sent
    least: int = 1  # elements of a bucket that are sent
    ratios: tuple[float, float] = (RATIO, SMALL_RATIO)  # by model

    def gradients(self, run: Run) -> list[list[Tensor]]:
        """By model, by step: .grad of all parameters end to end."""
        held: list[dict[Hashable, Tensor]] = [{} for _ in run.values]
        found: list[list[Tensor]] = [[] for _ in run.values[0]]
        for step in range(len(run.values[0][-1])):
            for model, steps in enumerate(found):
                calls = [value[model][step]["calls"] for value in run.values]
                steps.append(self._step(calls, model, held))
        return found

    def _step(
        self,
        calls: list[list[dict[str, Any]]],
        model: int,
        held: list[dict[Hashable, Tensor]],
    ) -> Tensor:
        pieces = list(torch.zeros(ALL, dtype=torch.float64).split(SIZES))
        for of_ranks in zip(*calls, strict=True):
            numbers = of_ranks[0]["parameters"]
            mean = self._bucket(
                [c["gradients"] for c in of_ranks], of_ranks[0], model, held
            )
            for number, piece in zip(numbers, mean.split(_sizes(numbers)), strict=True):
                pieces[number] = piece
        return torch.cat(pieces)

    def _bucket(
        self,
        gradients: list[Tensor],
        call: dict[str, Any],
        model: int,
        held: list[dict[Hashable, Tensor]],
    ) -> Tensor:
        sizes = _sizes(call["parameters"])
        keys: list[Hashable] = [
            number if self.by_number else (model, number)
            for number in call["parameters"]
        ]
        if self.by_index:
            sizes, keys = [sum(sizes)], [(model, "bucket", call["index"])]
        places = list(zip(keys, sizes, strict=True))
        kept_before = [
            torch.cat([_kept(h, key, size) for key, size in places]) for h in held
        ]
        parts = [
            own + kept.to(own) for own, kept in zip(gradients, kept_before, strict=True)
        ]
        sent = [self._sent(part, self.ratios[model]) for part in parts]
        mean = torch.stack(sent).mean(0)
        if self.overwrites:
            mean = _overwritten(sent) / len(sent)
        for own, part, mine in zip(held, parts, sent, strict=True):
            kept = self.keeps(part, mine, mean).split(sizes)
            own.update(zip(keys, kept, strict=True))
        return mean

    def _sent(self, values: Tensor, ratio: float) -> Tensor:
        kept = torch.zeros_like(values)
        k = max(self.least, int(ratio * len(values)))
        at = values.abs().topk(k).indices
        if self.threshold:
            at = (values.abs() >= values[at].abs().min()).nonzero()[:k, 0]
        kept[at] = values[at]
        return kept


def _sizes(numbers: list[int]) -> list[int]:
    return [SIZES[number] for number in numbers]


def _kept(held: dict[Hashable, Tensor], key: Hashable, size: int) -> Tensor:
    """The residual, or zeros if there is none of this size."""
    found = held.get(key)
    if found is None or len(found) != size:
        return torch.zeros(size, dtype=torch.float64)
    return found


def _overwritten(sent: list[Tensor]) -> Tensor:
    total = torch.zeros_like(sent[0])
    for one in sent:
        total = torch.where(one != 0, one, total)
    return total


def end_to_end(calls: list[dict[str, Any]]) -> Tensor:
    """A rank's own gradients of one step, in the order of the definition."""
    pieces = list(torch.zeros(ALL, dtype=torch.float64).split(SIZES))
    for call in calls:
        sizes = _sizes(call["parameters"])
        parts = call["gradients"].split(sizes)
        for number, piece in zip(call["parameters"], parts, strict=True):
            pieces[number] = piece
    return torch.cat(pieces)


def expect_infinite(actual: list[Tensor], what: str) -> None:
    """Of two equally infinite gradients one was sent, whichever: all ranks have it.

    Raises:
        NotYetError: one has not.
    """
    told = [own[INFINITES] for own in actual]
    if any(not bool(own.isinf().any()) for own in told):
        rank = next(r for r, own in enumerate(told) if not bool(own.isinf().any()))
        raise NotYetError(
            f"{what} is finite on rank {rank}, expected an inf: rank 0's hook got two "
            "infinite gradients and sends one of them",
            evidence=[(r, "has", brief(own)) for r, own in enumerate(told)],
        )


def without(values: Tensor) -> Tensor:
    """The values, with zeros in place of the infinite ones."""
    found = values.clone()
    found[INFINITES] = 0
    return found
