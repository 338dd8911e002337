"""What known misconceptions of 2.2 leave in .grad: one at a time, and two at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from distlab.grading.checks.gradient_accumulation.microbatches import (
    Guess,
    Means,
    Weight,
    Zoo,
    wrong_guesses,
)
from distlab.grading.kit.values import Suspect, same_everywhere
from distlab.grading.kit.zoo import where

RULE_ZERO = "backward() adds to .grad: set it to zero before the first microbatch"
RULE_ONE_SUM = "one all_reduce per gradient, after the last microbatch"
RULE_IN_PLACE = "comm.all_reduce(parameter.grad), once, after the last microbatch"
RULE_WEIGHT = "each mean times its samples / samples of all ranks"
WIPED = "call model.zero_grad() before the first backward(), and not again"

OWN = "every rank still has its own contribution: nothing was summed in place"
RANK_0 = "every rank has rank 0's contribution: the others' samples are lost"
SUMMED = "the accumulated gradient was summed over the ranks after every microbatch"
LEFT = "the gradients of the old step are still in"


def suspects_of(means: Means, old: float, model: Zoo) -> list[Suspect]:
    """Single mistakes first, so that one is never taken for two.

    `old` is what .grad held before. The gradients of the microbatches are independent:
    which of them is in the result, and how often, is a fact and not a guess.
    """
    return [
        *_transfers(means, old),
        *_special(means, old, model),
        *_weights(means),
        *_two_at_once(means, old),
    ]


def _transfers(means: Means, old: float) -> Iterator[Suspect]:
    """Each rank's part is right; what is added to it, or made of it, is not."""
    n, mean, parts = len(means.sizes), means.mean(), means.parts()

    def all_have(slug: str, value: Tensor, sentence: str, rule: str = "") -> Suspect:
        values = same_everywhere(value, n)
        return Suspect(slug=slug, values=values, sentence=sentence, rule=rule)

    divided = f"the gradient is 1/{n} of the mean: divided twice"
    yield all_have("divided-twice", mean / n, divided)
    slug = "gradients-not-zeroed"
    yield all_have(slug, mean + n * old, f"{LEFT} the sum", RULE_ZERO)
    yield all_have(slug, mean + old, f"{LEFT} .grad", RULE_ZERO)
    yield all_have(
        "gradients-wiped",
        torch.zeros_like(mean),
        "every gradient is zero or None: it was wiped out after backward()",
        WIPED,
    )
    yield all_have("rank0-gradient-for-all", parts[0], RANK_0)
    if n > 1:  # alone in the world a sum changes nothing, and only what was left shows
        yield all_have(
            "reduced-again",
            _again(means, _right(means), 0.0),
            f"{SUMMED}: what came first counts {n} times or more",
            RULE_ONE_SUM,
        )
        yield all_have(
            "reduced-again",
            _again(means, _right(means), old),
            f"{SUMMED}, and with it those of the old step, which were left in",
            f"{RULE_ZERO}; and {RULE_ONE_SUM}",
        )
    for left in (0.0, old):
        yield Suspect(
            slug="own-gradient-only",
            values=[part + left for part in parts],
            sentence=OWN,
            rule=RULE_IN_PLACE,
        )


def _special(means: Means, old: float, model: Zoo) -> Iterator[Suspect]:
    """Right but for parameters that two modules share, or that are not trained."""
    n, mean = len(means.sizes), means.mean()
    tied = where(model, lambda _, parameter: parameter is model.mixer.weight)
    frozen = where(model, lambda _, parameter: not parameter.requires_grad)
    unused = where(model, lambda name, _: name == "extra.unused")
    sentence = f"the gradient of a weight that two modules share is {n} × the mean"
    yield Suspect(
        slug="",
        values=same_everywhere(mean * (1 + (n - 1) * tied), n),
        sentence=sentence,
        rule="model.parameters() has a shared parameter once",
    )
    for values, whose in (
        (mean + old * frozen, "a frozen parameter"),
        (mean + n * old * frozen, "a frozen parameter"),
        (mean + old * unused, "a parameter that forward does not use"),
        (mean + n * old * unused, "a parameter that forward does not use"),
    ):
        yield Suspect(
            slug="gradients-not-zeroed",
            values=same_everywhere(values, n),
            sentence=f"{whose} still has its old gradient",
            rule="model.zero_grad() clears every .grad",
        )


def _weights(means: Means) -> Iterator[Suspect]:
    """A wrong weight, then a sum; and where that fits none, a sum divided by n.

    In this order, because with as many ranks as microbatches the means divided by K
    and summed are the means summed and divided by n.
    """
    n = len(means.sizes)
    for factor, more in ((1.0, ""), (1 / n, _by_ranks(n))):
        for slug, sentence, weight in wrong_guesses(means):
            total = torch.stack(means.summed(weight)).sum(0)
            values = same_everywhere(total * factor, n)
            text = f"{sentence}{more}"
            yield Suspect(slug=slug, values=values, sentence=text, rule=RULE_WEIGHT)


def _by_ranks(n: int) -> str:
    return f", apart from a division by the {n} ranks"


def _two_at_once(means: Means, old: float) -> Iterator[Suspect]:
    """Two mistakes; the one to fix first has the name, and the sentence has both.

    First comes what is no part of the gradient, then what is missing of it. A weight
    is best looked at when all else is right.
    """
    n, guesses = len(means.sizes), [_divided_too(means), *wrong_guesses(means)]
    for is_divided in (False, True):
        for guess in guesses:
            yield from _old_left_in(means, old, guess, is_divided)
    for guess in guesses if n > 1 else []:
        yield from _not_summed(means, guess)
        yield from _summed_again(means, guess)
    if n > 1:
        yield Suspect(
            slug="rank0-gradient-for-all",
            values=same_everywhere(means.parts()[0] + old, n),
            sentence=f"{RANK_0}; and {LEFT} .grad",
            rule="",
        )


def _right(means: Means) -> Weight:
    return lambda rank, k: means.sizes[rank][k] / means.total


def _divided_too(means: Means) -> Guess:
    """The weights are right, and the gradient is divided by n nevertheless."""
    n, right = len(means.sizes), _right(means)
    sentence = f"it was divided by {n} once too often"
    return "divided-twice", sentence, lambda rank, k: right(rank, k) / n


def _old_left_in(
    means: Means, old: float, guess: Guess, is_divided: bool
) -> Iterator[Suspect]:
    """The old gradients were summed too, and all of it divided; or added at the end."""
    n = len(means.sizes)
    total = torch.stack(means.summed(guess[2])).sum(0)
    values = [total / n + old] if is_divided else [total + n * old, total + old]
    for value in values:
        yield Suspect(
            slug="gradients-not-zeroed",
            values=same_everywhere(value, n),
            sentence=f"{LEFT} .grad; and {guess[1]}{_by_ranks(n) * is_divided}",
            rule=RULE_ZERO,
        )


def _not_summed(means: Means, guess: Guess) -> Iterator[Suspect]:
    n, parts = len(means.sizes), means.summed(guess[2])
    yield Suspect(
        slug="own-gradient-only",
        values=parts,
        sentence=f"{OWN}; and {guess[1]}",
        rule=RULE_IN_PLACE,
    )
    yield Suspect(
        slug="rank0-gradient-for-all",
        values=same_everywhere(parts[0], n),
        sentence=f"{RANK_0}; and {guess[1]}",
        rule="",
    )


def _summed_again(means: Means, guess: Guess) -> Iterator[Suspect]:
    n = len(means.sizes)
    yield Suspect(
        slug="reduced-again",
        values=same_everywhere(_again(means, guess[2], 0.0), n),
        sentence=f"{SUMMED}; and {guess[1]}",
        rule=RULE_ONE_SUM,
    )


def _again(means: Means, weight: Weight, old: float) -> Tensor:
    """Each rank adds a microbatch's part to what all have; then all are summed."""
    n = len(means.sizes)
    held = torch.full_like(means.gradients[0][0], old)
    for place in range(len(means.sizes[0])):
        new = [own[place] * weight(r, place) for r, own in enumerate(means.gradients)]
        held = n * held + torch.stack(new).sum(0)
    return held
