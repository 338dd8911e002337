"""Checks of task 2.1, `gradient_accumulation.accumulate`: the parts, the memory."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import nn

from distlab.grading.bench import Bench, Implementation
from distlab.grading.checks.activations import Activations
from distlab.grading.checks.microbatches import (
    RAGGED,
    first_means,
    gradients_of,
    make_microbatches,
    make_model,
    wrong_weights,
)
from distlab.grading.clause import clause
from distlab.grading.oracles import (
    Suspect,
    expect_values,
    same_everywhere,
)
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import Evidence

WORLDS = (3, 2, 4, 5, 1)
ROOM = 1.25  # of one microbatch: who keeps two keeps at least 1.5


def accumulate_once(
    context: RankContext, unit: ModuleType, seed: int
) -> dict[str, Any]:
    """One step's microbatches, unequally many and of uneven sizes."""
    device = context.comm.device
    model = make_model(seed).to(device)
    sizes = RAGGED[context.rank % len(RAGGED)]
    microbatches = [
        (inputs.to(device), targets.to(device))
        for inputs, targets in make_microbatches(seed, 0, context.rank, sizes)
    ]
    loss_fn = nn.functional.cross_entropy
    with Activations(model.parameters()) as alone:
        loss_fn(model(microbatches[0][0]), microbatches[0][1]).backward()
    model.zero_grad()
    with Activations(model.parameters()) as kept:
        unit.accumulate(context.comm, model, loss_fn, microbatches)
    return {"gradient": gradients_of(model), "one": alone.peak, "peak": kept.peak}


@clause("gradient_accumulation.accumulate", "C1", worlds=WORLDS)
def every_sample_counts_alike(impl: Implementation, cluster: Bench) -> str | None:
    """V: each rank's part, against every microbatch by itself."""
    n = cluster.world_size
    run = cluster.run(impl, accumulate_once)
    means = first_means(cluster.seed, RAGGED[:n])
    expect_values(
        [value["gradient"] for value in run.values],
        means.parts(),
        what="this rank's part of the gradient",
        suspects=[
            *wrong_weights(means),
            Suspect(
                slug="",
                values=same_everywhere(means.mean(), n),
                sentence="every rank has the whole mean: what is asked for is its part "
                "of it, and the ranks add up their parts in 2.2",
            ),
        ],
        rule="each microbatch's mean times its samples, by the samples of all ranks",
    )
    return (
        f"n = {n}: {means.total} samples in {sum(map(len, means.sizes))} microbatches"
    )


@clause("gradient_accumulation.accumulate", "C2", worlds=WORLDS)
def one_microbatch_at_a_time(impl: Implementation, cluster: Bench) -> str | None:
    """J: what autograd keeps at its peak, against one microbatch alone."""
    run = cluster.run(impl, accumulate_once)
    worst = max(run.values, key=lambda value: value["peak"] / value["one"])
    if worst["peak"] > ROOM * worst["one"]:
        times = worst["peak"] / worst["one"]
        raise NotYetError(
            f"at its peak autograd keeps {times:.1f} times the activations of one "
            "microbatch",
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
    return f"at its peak {worst['peak']} bytes of activations, as for one microbatch"
