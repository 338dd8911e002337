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
from distlab.terminal import enumerated, ranks_in_words

ORDER = "the order is: zero_grad, forward, backward, average, step"


def expect_epochs(run: Run) -> None:
    """The loader was told each epoch, once, before its batches were read.

    Raises:
        NotYetError: it was not.
    """
    right = list(range(NUM_EPOCHS))
    told = [record.rank for record in run.ranks if record.value["set_to"]]
    if told and len(told) < run.world_size:
        raise NotYetError(
            f"only {ranks_in_words(told)} called set_epoch, expected every rank to "
            "call it: now they read parts of different global batches",
            rule="train_loader.set_epoch(epoch), before each epoch, on every rank",
        )
    for record in run.ranks:
        set_to = record.value["set_to"]
        used = [epoch for epoch, _ in groupby(record.value["used"])]
        if not set_to:
            raise NotYetError(
                "fit never called set_epoch, so every epoch has the same order, "
                "expected a call before each epoch",
                slug="epoch-not-set",
                rule="train_loader.set_epoch(epoch), before each epoch, on every rank",
            )
        if used != right:
            is_old = used[:1] == [USED_BEFORE]
            raise NotYetError(
                f"with epoch {USED_BEFORE} set before fit, "
                * is_old
                + f"rank {record.rank} called set_epoch with {enumerated(set_to)}, so "
                f"its samples are those of {_epochs(used)}, expected {_epochs(right)}",
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
                f"rank {record.rank} trained with the model in evaluation mode, "
                "expected training mode",
                slug="wrong-mode",
                rule="model.train() before the first step",
            )
    for rank, count in enumerate(steps):
        if count and count != batches:
            raise NotYetError(
                f"in {NUM_EPOCHS} epochs of {STEPS_PER_EPOCH} batches, rank {rank} "
                f"took {count} optimizer step{'s' * (count != 1)}, expected {batches}: "
                "one for each batch",
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
            f"in {batches} steps, the ranks averaged their gradients only "
            f"{'once' if averages == 1 else f'{averages} times'}, expected it in every "
            "step",
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
            sentence="each rank started training from different weights, expected "
            "equal ones: equal steps don't bring them together",
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
            sentence=f"each step used the sum of the ranks' gradients, {n} × the mean, "
            "expected the mean",
            rule="train_step averages; do not average by hand",
        ),
        Suspect(
            slug="divided-twice",
            values=trained(_divided_twice),
            sentence=f"each step used 1/{n} of the mean gradient, as if divided by {n} "
            "twice, expected the mean",
            rule="train_step divides already",
        ),
        Suspect(
            slug="gradients-not-zeroed",
            values=fit_alone(seed, n, zeroed=False).weights,
            sentence="each step also applied the gradients of all earlier steps, "
            "expected only its own",
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
            "each epoch's loss is the mean over its batches, expected the mean over "
            "its samples: the last batch is smaller",
            of_samples,
        ),
        (
            "",
            mean[:, -1],
            "each epoch's loss is that of its last batch, expected the mean over all "
            "its samples",
            of_samples,
        ),
        (
            "batches-not-samples",
            sums / STEPS_PER_EPOCH,
            "each epoch's loss is the sum over its samples divided by the number of "
            "batches, expected by the number of samples",
            of_samples,
        ),
        (
            "batches-not-samples",
            mean.sum(1) / sizes.sum(),
            "each epoch's loss is the sum of its batches' means divided by the number "
            "of samples, expected the sum over its samples divided",
            of_samples,
        ),
        (
            "",
            sums,
            "each epoch's loss is the sum over its samples, expected their mean",
            of_samples,
        ),
        (
            "",
            mean.sum(1),
            "each epoch's loss is the sum of its batches' mean losses, expected the "
            "mean over its samples",
            of_samples,
        ),
        (
            "sum-loss-returned",
            expected * n,
            f"with {n} ranks, each epoch's loss is {n} times the mean over its "
            "samples, expected the mean",
            "train_step returns the mean over all ranks already",
        ),
        (
            "",
            expected / n,
            f"each epoch's loss is 1/{n} of the mean over its samples, as if divided "
            f"by {n} twice, expected the mean",
            "train_step returns the mean over all ranks already",
        ),
        (
            "",
            running,
            "each epoch's loss is the mean over all epochs so far, expected the mean "
            "over its own samples only",
            "begin each epoch with sums of zero",
        ),
        (
            "",
            expected[-1].repeat(NUM_EPOCHS),
            "every entry of the list is the last epoch's loss, expected each epoch's "
            "own loss",
            "append a new number after each epoch",
        ),
    ]
    return [
        Suspect(
            slug="local-loss-returned",
            values=list(own.T),
            sentence="each rank returned the mean loss over its own samples, expected "
            "the mean over all ranks' samples",
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
        why = "optimizer.step() was never called"
    elif "backward" not in events:
        why = "backward() was never called"
    elif _wiped(events):
        slug, why = "gradients-wiped", "zero_grad() came between backward() and step()"
    return Suspect(
        slug=slug,
        values=same_everywhere(weights_of(Net(seed)), run.world_size),
        sentence=f"after fit, every rank still has rank 0's initial weights: {why}",
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
            f"{alone}, though the ranks did call all_reduce, expected averaging before "
            "the step",
        )
    return "own-gradient-only", f"{alone}, expected the mean of all ranks' gradients"


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


def _epochs(numbers: Sequence[int]) -> str:
    return f"epoch{'s' * (len(numbers) > 1)} {enumerated(numbers)}"
