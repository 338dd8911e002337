"""Checks of task 2.2, `gradient_accumulation.sync_once`: the mean, and what is sent."""

from __future__ import annotations

import math
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from distlab.comm import COLLECTIVES
from distlab.grading.checks.gradient_accumulation.microbatches import (
    FINE,
    LEVEL,
    Zoo,
    finished,
    first_means,
    gradients_of,
    loss_for,
    make_microbatches,
)
from distlab.grading.clause import clause
from distlab.grading.kit.by_name import of_parameter
from distlab.grading.kit.messages import calls_of_each, expect_messages
from distlab.grading.kit.values import (
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.kit.zoo import with_old_gradients
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import SENDS

WORLDS = (3, 2, 4, 5, 1)
FINER = (3, 4, 5, 1)  # so three ranks have most runs: what a rank sends is seen there
INFINITE = 4  # ranks, where the old gradients have an inf
IDLE = 2  # ranks, where the model has frozen and unused parameters


def make_model(seed: int, n: int) -> Zoo:
    """On two ranks some of its parameters get no gradient, and one is a view.

    Not on three, which come first: a mistake that shows there has its own name.
    """
    idle = n == IDLE
    return Zoo(seed, frozen=idle, unused=idle, transposed=idle)


def sync(
    context: RankContext, unit: ModuleType, seed: int, fine: bool = False
) -> Tensor:
    """The gradients of one step; `fine` cuts the same samples into more parts."""
    device = context.comm.device
    model = make_model(seed, context.world_size).to(device)
    with_old_gradients(model)
    if context.world_size == INFINITE:
        gain = model.extra["gain"]
        gain.grad = torch.full_like(gain, torch.inf)
    sizes = (FINE if fine else LEVEL)[context.rank % len(LEVEL)]
    microbatches = [
        (inputs.to(device), targets.to(device))
        for inputs, targets in make_microbatches(seed, 0, context.rank, sizes)
    ]
    loss_fn = loss_for(context.rank, context.world_size, sizes)
    unit.sync_once(context.comm, model, loss_fn, microbatches)
    return gradients_of(model)


@clause("gradient_accumulation.sync_once", "C1", worlds=WORLDS, runs=[on_ranks(sync)])
def mean_over_the_step(runs: Runs) -> str | None:
    """Every rank's gradients are those of the whole batch, the same bits."""
    n = runs.world_size
    run = finished(runs, sync, frozen=n == IDLE, transposed=n == IDLE)
    means = first_means(runs.seed, LEVEL[:n], n == IDLE)
    found = list(run.values)
    where = "with an inf in .grad before the call, " * (n == INFINITE)
    expect_values(
        found,
        same_everywhere(means.mean(), n),
        what=partial(
            of_parameter,
            f"{where}the gradient",
            partial(make_model, runs.seed, n),
            found,
            means.mean(),
        ),
        parts=means.parts(),
    )
    expect_equal_bits(
        list(run.values),
        what="the gradient",
        rule="every rank must hold the result of the very same all_reduce",
    )
    expect_messages(run, "the gradient is right, but not through comm")
    return f"n = {n}: the mean over {means.total} samples, on every rank"


@clause(
    "gradient_accumulation.sync_once",
    "C2",
    worlds=FINER,
    runs=[on_ranks(sync), on_ranks(sync, fine=True)],
)
def sent_once(runs: Runs) -> str | None:
    """The elements that are sent, with three microbatches and with five."""
    few, many = finished(runs, sync), finished(runs, on_ranks(sync, fine=True))
    size = sum(p.numel() for p in Zoo(runs.seed).parameters())
    sent = [max(_gradients_sent(run)) for run in (few, many)]
    if sent[1] > sent[0] + size // 2:
        raise NotYetError(
            f"with 3 microbatches a rank sends {sent[0] / size:.3g} times the bytes of "
            f"its gradients, and with 5 microbatches {sent[1] / size:.3g} times, "
            "expected once, after the last",
            slug="synced-every-microbatch",
            evidence=calls_of_each(many),
            rule="accumulate first; then one all_reduce of the sums",
        )
    if _is_collective(many) and sent[1] > 1.5 * size:
        raise NotYetError(
            f"in one step, a rank passes {sent[1]} elements to comm, expected each of "
            f"the {size} gradient elements once",
            evidence=calls_of_each(many),
            rule="every gradient goes through one all_reduce",
        )
    return f"{sent[1]} elements sent per rank, with 3 microbatches and with 5"


def _gradients_sent(run: Run) -> list[int]:
    """For each rank the elements of all calls but those about a few numbers."""
    return [
        sum(
            size
            for call in record.calls()
            if call["op"] in (*COLLECTIVES, *SENDS)
            and (size := math.prod(call["shape"] or [])) > 1
        )
        for record in run.ranks
    ]


def _is_collective(run: Run) -> bool:
    return all(c["op"] in COLLECTIVES for r in run.ranks for c in r.calls())
