"""Which mistake a wrong training was: by its weights, and by what was called when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from distlab.grading.checks.fit_reference import (
    NUM_EPOCHS,
    STEPS_PER_EPOCH,
    Gradients,
    Net,
    Rule,
    fit_alone,
)
from distlab.grading.oracles import Suspect, same_everywhere
from distlab.grading.reference import weights_of
from distlab.grading.verdict import NotYetError
from distlab.runner import Run
from distlab.runner.autopsy import Evidence

ORDER = "the order is: zero_grad, forward, backward, average, step"


def expect_epochs(run: Run) -> None:
    """The loader was told each epoch, once, before its batches were read.

    Raises:
        NotYetError: it was not.
    """
    right = list(range(NUM_EPOCHS))
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
                f"rank {record.rank} read the batches of epochs {used}, and should "
                f"those of {right}: set_epoch was called with {set_to}",
                slug="epoch-not-set" if len(set(used)) < NUM_EPOCHS else "",
                evidence=tuple(
                    Evidence(rank=r.rank, state="read", text=f"{r.value['used']}")
                    for r in run.ranks
                ),
                rule="for epoch in range(num_epochs): first set_epoch(epoch), then "
                "the loop over the batches",
            )


def expect_as_many_steps(run: Run) -> None:
    """Every rank has stepped once per global batch, and trained in training mode.

    Raises:
        NotYetError: one has not.
    """
    steps = [record.value["events"].count("step") for record in run.ranks]
    batches = NUM_EPOCHS * STEPS_PER_EPOCH
    for record in run.ranks:
        if not all(record.value["trained_in"]):
            raise NotYetError(
                f"rank {record.rank} trained with the model in evaluation mode",
                slug="wrong-mode",
                rule="model.train() at the start of each epoch",
            )
    for rank, count in enumerate(steps):
        if count == batches:
            continue
        less = "no samples: it must step too" if count < batches else ""
        raise NotYetError(
            f"rank {rank} took {count} optimizer steps; there were {batches} batches"
            + (f". In some of them it had {less}" if less and count else ""),
            evidence=tuple(
                Evidence(rank=r, state="took", text=f"{c} steps")
                for r, c in enumerate(steps)
            ),
            rule="average_weighted and optimizer.step() stand outside of any if: only "
            "forward and backward need samples",
        )


def expect_averaging(run: Run) -> None:
    """Where the ranks average at all they do so in each step.

    Raises:
        NotYetError: what went through all_reduce is not enough for that.
    """
    batches, numel = (
        NUM_EPOCHS * STEPS_PER_EPOCH,
        sum(p.numel() for p in Net(0).parameters()),
    )
    sizes = [
        math.prod(call["shape"] or [])
        for call in run.ranks[0].calls()
        if call["op"] == "all_reduce"
    ]
    # Three numbers may be the last bias, or the sums of an evaluation.
    averages = sum(size for size in sizes if size > 3) // (numel - 3)
    if 0 < averages < batches:
        raise NotYetError(
            f"the ranks averaged {averages} times in {batches} steps: in between each "
            "went its own way",
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
            sentence="every rank started from weights of its own: equal steps keep "
            "them apart",
            rule="make the models equal before the first step",
        ),
        *[
            Suspect(
                slug="mean-of-means",
                values=trained(rule),
                sentence="rank means averaged: the shares are not equally large, so "
                "weigh each by its sample count",
                rule="average_weighted, with the number of samples of this share",
            )
            for rule in (_plain, _plain_of_some)
        ],
        Suspect(
            slug="sum-not-mean",
            values=trained(_sum),
            sentence="the ranks' gradients were summed, and none was weighted",
            rule="average_weighted, with the number of samples of this share",
        ),
        *[
            Suspect(slug=slug, values=values, sentence=why, rule=ORDER)
            for values in (
                trained(_own),
                trained(_own_or_zero),
                fit_alone(seed, n, _own, equal_start=False).weights,
            )
        ],
        Suspect(
            slug="gradients-not-zeroed",
            values=fit_alone(seed, n, zeroed=False).weights,
            sentence="each step also applied the gradients of the steps before it",
            rule="optimizer.zero_grad() before backward",
        ),
        _unmoved(run, seed),
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
        sentence=f"the weights are rank 0's first ones, unchanged: {why}",
        rule=ORDER,
    )


def _why_own(run: Run) -> tuple[str, str]:
    """Why each rank may have stepped with its own gradient."""
    alone = "each rank stepped with its own gradient"
    record = run.ranks[0]
    averaging = [call for call in record.calls() if call["op"] == "all_reduce"]
    if len(averaging) > NUM_EPOCHS * STEPS_PER_EPOCH:  # more than one call per step
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


def _there(gradients: Gradients) -> list[Tensor]:
    return [gradient for gradient in gradients if gradient is not None]


def _own(gradients: Gradients, counts: Sequence[int], rank: int) -> Tensor | None:
    return gradients[rank]


def _own_or_zero(
    gradients: Gradients, counts: Sequence[int], rank: int
) -> Tensor | None:
    own = gradients[rank]
    return torch.zeros_like(_there(gradients)[0]) if own is None else own


def _plain(gradients: Gradients, counts: Sequence[int], rank: int) -> Tensor | None:
    return torch.stack(_there(gradients)).sum(0) / len(gradients)


def _plain_of_some(
    gradients: Gradients, counts: Sequence[int], rank: int
) -> Tensor | None:
    return torch.stack(_there(gradients)).mean(0)


def _sum(gradients: Gradients, counts: Sequence[int], rank: int) -> Tensor | None:
    return torch.stack(_there(gradients)).sum(0)
