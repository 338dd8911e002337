"""Which mistake a wrong training was: by its weights, and by what was called when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from distlab.grading.checks.trainer.fit_reference import (
    NUM_EPOCHS,
    SIZES,
    STEPS_PER_EPOCH,
    USED_BEFORE,
    Net,
    Rule,
    fit_alone,
)
from distlab.grading.kit.flat import weights_of
from distlab.grading.kit.values import Suspect, same_everywhere
from distlab.grading.verdict import NotYetError
from distlab.runner import Run

ORDER = "the order is: zero_grad, forward, backward, average, step"


def expect_epochs(run: Run) -> None:
    """The loader was told each epoch, once, before its batches were read.

    Raises:
        NotYetError: it was not.
    """
    right = list(range(NUM_EPOCHS))
    told = [record.rank for record in run.ranks if record.value["set_to"]]
    if told and len(told) < run.world_size:
        ranks = ", ".join(map(str, told))
        raise NotYetError(
            f"set_epoch was called on rank{'s' * (len(told) > 1)} {ranks} only: the "
            "ranks do not read parts of the same global batches",
            rule="train_loader.set_epoch(epoch), before each epoch, on every rank",
        )
    for record in run.ranks:
        set_to = record.value["set_to"]
        used = [epoch for epoch, _ in groupby(record.value["used"])]
        if not set_to:
            raise NotYetError(
                "set_epoch was never called: every epoch has the same order",
                slug="epoch-not-set",
                rule="train_loader.set_epoch(epoch), before each epoch, on every rank",
            )
        if used != right:
            raise NotYetError(
                f"rank {record.rank} read the batches of epochs {used}; expected "
                f"{right}: set_epoch was called with {set_to}"
                + f"; the loader was in epoch {USED_BEFORE} before"
                * (used[:1] == [USED_BEFORE]),
                slug="epoch-not-set" if len(set(used)) < NUM_EPOCHS else "",
                evidence=[(r.rank, "read", f"{r.value['used']}") for r in run.ranks],
                rule="for epoch in range(num_epochs): first set_epoch(epoch), then "
                "the loop over the batches",
            )


def expect_steps(run: Run) -> None:
    """Every rank has stepped once per global batch, and trained in training mode.

    Raises:
        NotYetError: a rank has not.
    """
    steps = [record.value["events"].count("step") for record in run.ranks]
    batches = NUM_EPOCHS * STEPS_PER_EPOCH
    for record in run.ranks:
        if not all(record.value["trained_in"]):
            raise NotYetError(
                f"rank {record.rank} trained with the model in evaluation mode",
                slug="wrong-mode",
                rule="model.train() before the first step",
            )
    for rank, count in enumerate(steps):
        if count and count != batches:
            raise NotYetError(
                f"rank {rank} took {count} optimizer steps; expected {batches}, one "
                "for each batch",
                evidence=[(r, "took", f"{c} steps") for r, c in enumerate(steps)],
                rule="one step for each batch, on every rank",
            )


def expect_averaging(run: Run) -> None:
    """Where the ranks average at all they do so in each step.

    Raises:
        NotYetError: what went through all_reduce is not enough for that.
    """
    batches = NUM_EPOCHS * STEPS_PER_EPOCH
    numel = sum(p.numel() for p in Net(0).parameters() if p.numel() > 3)
    sizes = [
        math.prod(call["shape"] or [])
        for call in run.ranks[0].calls()
        if call["op"] == "all_reduce"
    ]
    # A few elements may be the last bias, or a loss.
    averages = sum(size for size in sizes if size > 3) // numel
    if 0 < averages < batches:
        raise NotYetError(
            f"the ranks averaged {averages} times in {batches} steps: in the other "
            "steps each rank used its own gradient",
            rule="average the gradients in every step, before optimizer.step()",
        )


def suspects_of(run: Run, seed: int) -> list[Suspect]:
    """What known mistakes would have led to, given what the ranks did."""
    n = run.world_size

    def trained(rule: Rule) -> list[Tensor]:
        return fit_alone(seed, n, rule).weights

    slug, why = _why_own(run)
    return [
        Suspect(
            slug="unequal-start",
            values=fit_alone(seed, n, equal_start=False).weights,
            sentence="each rank started from different weights: equal steps keep "
            "them apart",
            rule="make the models equal before the first step",
        ),
        *[
            Suspect(slug=slug, values=values, sentence=why, rule=ORDER)
            for values in (
                trained(_own),
                fit_alone(seed, n, _own, equal_start=False).weights,
            )
        ],
        Suspect(
            slug="sum-not-mean",
            values=trained(_sum),
            sentence=f"the gradients were {n} × the mean: summed and never divided",
            rule="train_step averages; do not average by hand",
        ),
        Suspect(
            slug="divided-twice",
            values=trained(_divided_twice),
            sentence=f"the gradients were 1/{n} of the mean: divided twice",
            rule="train_step divides already",
        ),
        Suspect(
            slug="gradients-not-zeroed",
            values=fit_alone(seed, n, zeroed=False).weights,
            sentence="each step also applied the gradients of the steps before it",
            rule="optimizer.zero_grad() before backward",
        ),
        _unmoved(run, seed),
    ]


def loss_suspects(losses: Tensor, expected: Tensor) -> list[Suspect]:
    """What known mistakes make of the losses (EPOCHS, STEPS, ranks) of all batches."""
    n = losses.shape[2]
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    mean = losses.mean(2)
    sums = (mean * sizes).sum(1)
    running = sums.cumsum(0) / (sizes.sum() * torch.arange(1, NUM_EPOCHS + 1))
    own = (losses * sizes[:, None]).sum(1) / sizes.sum()
    of_samples = "add up loss × samples; divide by the samples of the epoch"
    known = [
        (
            "mean-of-means",
            mean.mean(1),
            "the loss of an epoch is the mean over its batches, as if all batches "
            "were equally large",
            of_samples,
        ),
        ("", mean[:, -1], "the loss of an epoch is that of its last batch", of_samples),
        (
            "batches-not-samples",
            sums / STEPS_PER_EPOCH,
            "the losses were multiplied by the number of samples and divided by the "
            "number of batches",
            of_samples,
        ),
        (
            "batches-not-samples",
            mean.sum(1) / sizes.sum(),
            "the mean losses of the batches were added up and divided by the number "
            "of samples",
            of_samples,
        ),
        ("", sums, "the losses of an epoch were summed and never divided", of_samples),
        ("", mean.sum(1), "the losses were summed and never divided", of_samples),
        (
            "sum-loss-returned",
            expected * n,
            f"the loss of each epoch is {n} × the mean",
            "train_step returns the mean over all ranks already",
        ),
        (
            "",
            expected / n,
            f"the loss of each epoch is 1/{n} of the mean: divided twice",
            "train_step returns the mean over all ranks already",
        ),
        (
            "",
            running,
            "the sums were not reset: they still hold the epochs before",
            "begin each epoch with sums of zero",
        ),
        (
            "",
            expected[-1].repeat(NUM_EPOCHS),
            "the loss of each epoch is that of the last epoch",
            "append a new number after each epoch",
        ),
    ]
    return [
        Suspect(
            slug="local-loss-returned",
            values=list(own.T),
            sentence="each rank returned the mean loss over its local samples only",
            rule="use what train_step returns: the mean over all ranks",
        ),
        *[
            Suspect(
                slug=slug,
                values=same_everywhere(values, n),
                sentence=sentence,
                rule=rule,
            )
            for slug, values, sentence, rule in known
        ],
    ]


def _unmoved(run: Run, seed: int) -> Suspect:
    events = run.ranks[0].value["events"]
    slug, why = "", "no gradient was applied"
    if "step" not in events:
        why = "optimizer.step() was not called"
    elif "backward" not in events:
        why = "backward() was not called"
    elif _wiped(events):
        slug, why = "gradients-wiped", "zero_grad() came between backward() and step()"
    return Suspect(
        slug=slug,
        values=same_everywhere(weights_of(Net(seed)), run.world_size),
        sentence=f"the weights are the initial weights of rank 0: {why}",
        rule=ORDER,
    )


def _why_own(run: Run) -> tuple[str, str]:
    """Why each rank may have stepped with its own gradient."""
    alone = "each rank stepped with its own gradient"
    record = run.ranks[0]
    averaging = [call for call in record.calls() if call["op"] == "all_reduce"]
    if sum(math.prod(c["shape"] or []) > 1 for c in averaging):  # not of the loss alone
        return (
            "stepped-before-averaging",
            f"{alone}: the averaging came after the step",
        )
    return "own-gradient-only", f"{alone}: the gradients were not averaged"


def _wiped(events: Sequence[str]) -> bool:
    """Whether between a backward and the next step the gradients were zeroed."""
    after = events[events.index("backward") :]
    return "zero_grad" in after[: after.index("step")] if "step" in after else False


# ── wrong rules ─────────────────────────────────────────────────────────────────────


def _own(gradients: Sequence[Tensor], rank: int) -> Tensor:
    return gradients[rank]


def _sum(gradients: Sequence[Tensor], rank: int) -> Tensor:
    return torch.stack(list(gradients)).sum(0)


def _divided_twice(gradients: Sequence[Tensor], rank: int) -> Tensor:
    return torch.stack(list(gradients)).mean(0) / len(gradients)
