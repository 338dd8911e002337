"""Names for wrong weights, wrong means, and calls that some ranks leave out."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distlab.comm import COLLECTIVES
from distlab.grading.kit.values import Suspect, same_everywhere
from distlab.grading.verdict import NotYetError
from distlab.runner import Run
from distlab.runner.autopsy import evidence

PLAIN_MEAN = "rank means averaged: weigh each rank by its sample count"


def wrong_weights(counts: Tensor) -> list[Suspect]:
    """What known mistakes make of `counts` (ranks, steps); a row for each rank."""
    n, total = len(counts), counts.sum(0)
    guesses = [
        (
            "mean-of-means",
            torch.full_like(counts, 1 / n),
            f"every rank's weight is 1/{n}, however many samples it has",
        ),
        (
            "mean-of-means",
            (counts > 0).to(counts.dtype) / n,
            f"the weight of each rank with samples is 1/{n}, however many it has",
        ),
        ("", counts, "the weight is the number of samples, not its share of all"),
        (
            "",
            (counts > 0).to(counts.dtype),
            "every rank's weight is 1: its samples by its own samples",
        ),
        (
            "",
            counts.floor_divide(total),
            "the weight is 0, also where a rank has samples: the share was rounded "
            "down, or never reckoned",
        ),
        (
            "",
            torch.where(counts > 0, total / counts, counts),
            "the weight is upside down: all samples by this rank's",
        ),
        ("", counts / counts.amax(0), "divided by the largest count, not by the sum"),
        (
            "",
            counts * n / total,
            f"the weights of all ranks add up to {n}, and should to 1",
        ),
        (
            "divided-twice",
            counts / total / n,
            f"the weights of all ranks add up to 1/{n}, and should to 1: divided twice",
        ),
    ]
    return [
        Suspect(slug=slug, values=list(values), sentence=sentence)
        for slug, values, sentence in guesses
    ]


def wrong_means(own: list[Tensor], counts: list[int]) -> list[Suspect]:
    """What known mistakes make of the ranks' own gradients, one flat tensor each."""
    n, total = len(own), sum(counts)
    weights = [count / total for count in counts]
    plain = torch.stack(own).sum(0)
    per_sample = "a rank's .grad is a mean: times its samples it is the sum over them"
    mean = sum((w * g for w, g in zip(weights, own, strict=True)), torch.zeros(()))
    with_samples = sum(count > 0 for count in counts)
    everywhere = {
        "mean-of-means": [
            (plain / n, PLAIN_MEAN),
            (plain / with_samples, PLAIN_MEAN),
        ],
        "sum-not-mean": [
            (plain, "the ranks' gradients were summed without weights"),
            (
                mean * total,
                f"the gradient is {total} × the mean: the sum over all samples, "
                "never divided",
            ),
        ],
        "divided-twice": [
            (
                mean / n,
                f"the gradient is 1/{n} of the mean: the weights add up to 1, so the "
                "sum is not divided again",
            )
        ],
        "rank0-gradient-for-all": [
            (own[0], "every rank has rank 0's gradient: the other ranks' data are lost")
        ],
    }
    found = [
        Suspect(slug=slug, values=same_everywhere(value, n), sentence=sentence)
        for slug, guesses in everywhere.items()
        for value, sentence in guesses
    ]
    found += [
        Suspect(
            slug="",
            values=same_everywhere(plain / total, n),
            sentence="the ranks' means were summed without weights, and divided by the "
            f"{total} samples of all ranks",
            rule=per_sample,
        ),
        Suspect(
            slug="weighted-after-sum",
            values=[w * plain for w in weights],
            sentence="the sum of all ranks was weighted, by each rank with its own "
            "weight",
            rule="multiply .grad by the weight first; then sum",
        ),
        Suspect(
            slug="own-gradient-only",
            values=[w * g for w, g in zip(weights, own, strict=True)],
            sentence="every rank has its own gradient times its weight: never summed",
            rule="multiply by the weight, then sum over the ranks, in place",
        ),
        Suspect(
            slug="own-gradient-only",
            values=own,
            sentence="every rank still has its own gradient: nothing was averaged "
            "in place",
            rule="write the mean into .grad",
        ),
    ]
    return found


def skipped_none(run: Run, present: list[dict[str, int]]) -> NotYetError | None:
    """Every rank averages what it has a gradient for, and they have not the same.

    `present` has, for each rank, those parameters with their number of elements.
    """
    dtypes = {
        str(call["dtype"])
        for record in run.ranks
        for call in record.calls()
        if call["op"] in COLLECTIVES and math.prod(call["shape"] or []) > 1
    }
    if len(dtypes) > 1:
        return None  # the misfit is another one
    for record, sizes in zip(run.ranks, present, strict=True):
        called = [
            math.prod(call["shape"] or [])
            for call in record.calls()
            if call["op"] in COLLECTIVES
        ]
        vectors = [size for size in called if size > 1]
        one_by_one = [size for size in sizes.values() if size > 1][: len(vectors)]
        if vectors not in (one_by_one, [sum(sizes.values())]):
            return None
    names = max(present, key=len)
    for rank, own in enumerate(present):
        lacks = next((name for name in names if name not in own), "")
        if lacks:
            return NotYetError(
                f"rank {rank} passes over {lacks}, whose .grad is None there, while "
                f"rank {present.index(names)} averages it",
                slug="none-gradient-skipped",
                evidence=evidence(run),
                rule="where .grad is None a rank adds zeros: the calls are the same "
                "on every rank",
                fatal=True,
            )
    return None
