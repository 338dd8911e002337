"""Checks of task 2.1, `gradient_accumulation.accumulate`: contributions and memory."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch

from distlab.grading.checks.gradient_accumulation.microbatches import (
    RAGGED,
    Means,
    Zoo,
    finished,
    first_means,
    gradients_of,
    loss_for,
    loss_of,
    make_microbatches,
)
from distlab.grading.clause import clause
from distlab.grading.kit.again import turned
from distlab.grading.kit.by_name import of_parameter
from distlab.grading.kit.outputs import Outputs
from distlab.grading.kit.values import expect_values
from distlab.grading.kit.zoo import STALE
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import Evidence
from distlab.saved_tensors import SavedTensors

WORLDS = (3, 2, 4, 5, 1)
ROOM = 1.25  # of one microbatch: who keeps two keeps at least 1.5
IDLE = 2  # ranks, where the model has frozen and unused parameters
RESULTS = 2  # a loop's variable still holds the one before


def accumulate_once(
    context: RankContext, unit: ModuleType, seed: int
) -> dict[str, Any]:
    """One step's microbatches, unequally many and of uneven sizes."""
    device, n = context.comm.device, context.world_size
    idle = n == IDLE
    model = Zoo(seed, frozen=idle, unused=idle, transposed=True).to(device)
    sizes = turned(RAGGED, seed)[context.rank % len(RAGGED)]
    microbatches = [
        (inputs.to(device), targets.to(device))
        for inputs, targets in make_microbatches(seed, 0, context.rank, sizes)
    ]
    with SavedTensors(model.parameters()) as alone:
        loss_of(model(microbatches[0][0]), microbatches[0][1]).backward()
    model.zero_grad()
    first = model.first.weight  # the others have none
    first.grad = torch.full_like(first, STALE)
    old, results = gradients_of(model), Outputs(model)
    with SavedTensors(model.parameters()) as kept:
        loss_fn = loss_for(context.rank, n, sizes)
        unit.accumulate(context.comm, model, loss_fn, microbatches)
    return {
        "added": gradients_of(model) - old,
        "one": alone.peak,
        "peak": kept.peak,
        "results": results.peak,
    }


def _added(runs: Runs, means: Means) -> str:
    """The gradient; and of which parameter, if that isn't an ordinary one."""
    n, what = runs.world_size, "the accumulated gradient"
    idle = n == IDLE
    model = partial(Zoo, runs.seed, frozen=idle, unused=idle, transposed=True)
    found = [value["added"] for value in runs.finished(accumulate_once).values]
    for own, right in zip(found, means.parts(), strict=True):
        said = of_parameter(what, model, [own], right)
        if ", which" in said:
            return said
    return what


@clause(
    "gradient_accumulation.accumulate",
    "C1",
    worlds=WORLDS,
    runs=[on_ranks(accumulate_once)],
)
def every_sample_counts_alike(runs: Runs) -> str | None:
    """Each rank's contribution, against every microbatch by itself."""
    n = runs.world_size
    run = finished(
        runs, accumulate_once, frozen=runs.world_size == IDLE, transposed=True
    )
    means = first_means(runs.seed, turned(RAGGED, runs.seed)[:n], n == IDLE)
    expect_values(
        [value["added"] for value in run.values],
        means.parts(),
        what=partial(_added, runs, means),
    )
    return (
        f"n = {n}: {means.total} samples in {sum(map(len, means.sizes))} microbatches"
    )


@clause(
    "gradient_accumulation.accumulate",
    "C2",
    worlds=WORLDS,
    runs=[on_ranks(accumulate_once)],
)
def one_microbatch_at_a_time(runs: Runs) -> str | None:
    """What autograd keeps at its peak, against one microbatch alone."""
    run = finished(
        runs, accumulate_once, frozen=runs.world_size == IDLE, transposed=True
    )
    worst = max(run.values, key=lambda value: value["peak"] / value["one"])
    if worst["peak"] > ROOM * worst["one"]:
        times = worst["peak"] / worst["one"]
        raise NotYetError(
            f"at the peak, autograd keeps the activations of {times:.3g} microbatches, "
            "expected only one microbatch's at a time",
            slug="graphs-kept",
            evidence=tuple(
                Evidence(
                    rank=rank,
                    state="kept",
                    text=f"{value['peak']} bytes   one microbatch {value['one']} bytes",
                )
                for rank, value in enumerate(run.values)
            ),
            rule="backward() of one microbatch before forward of the next",
        )
    _expect_results_let_go([value["results"] for value in run.values])
    return f"at the peak {worst['peak']} bytes of activations, as for one microbatch"


def _expect_results_let_go(results: list[int]) -> None:
    if max(results) <= RESULTS:
        return
    raise NotYetError(
        f"{max(results)} outputs of the model are alive at the same time, each with "
        f"its graph, expected at most {RESULTS}",
        slug="graphs-kept",
        evidence=tuple(
            Evidence(rank=rank, state="held", text=f"{count} outputs of the model")
            for rank, count in enumerate(results)
        ),
        rule="drop a microbatch's result before the next forward; to keep its values, "
        "keep result.detach()",
    )
