"""Forgotten set_epoch: a shuffling sampler that deals the same order in every epoch.

How it knows: one loader was passed over at least twice, its sampler shuffles, and the
indices came in the same order although a permutation of so many samples can't repeat
by chance. A wrong value, a call too late or on another sampler look the same.
Silent: with one epoch, without shuffling, below 5 samples per rank, and if a pass was
broken off before 5 samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from distlab.audit.findings import Finding
from distlab.audit.trial import Trial, epochs, training_loaders

ENOUGH = 5


def find(trial: Trial) -> Iterator[Finding]:
    """Return a finding per loader whose order repeats."""
    log = trial.logs[0]
    training = training_loaders(log)
    for loader in log.of("loader"):
        if not (loader["distributed"] and loader["shuffle"]):
            continue
        if loader["number"] not in training:
            continue
        passes = epochs(log, loader["number"])
        for number, (before, after) in enumerate(pairwise(passes)):
            if after.at is None or _differ(before.indices, after.indices):
                continue
            yield Finding(
                after.at,
                "set-epoch",
                f"epochs {number} and {number + 1} read the samples in the same order; "
                f"the sampler belongs to the loader at {loader.at}",
                "call sampler.set_epoch(epoch) before each pass over the loader",
            )
            break


def _differ(before: list[int] | None, after: list[int] | None) -> bool:
    if not before or not after:
        return True
    shared = min(len(before), len(after))
    return shared < ENOUGH or before[:shared] != after[:shared]
