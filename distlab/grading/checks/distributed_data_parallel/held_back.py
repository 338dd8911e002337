"""Checks of task 3.11, `distributed_data_parallel.finish`: C3, no_sync()."""

from __future__ import annotations

from contextlib import suppress
from types import ModuleType
from typing import Any

import torch

from distlab.grading.checks.distributed_data_parallel.finish import (
    all_there,
    mean_in_each_step,
)
from distlab.grading.checks.distributed_data_parallel.steps import Steps
from distlab.grading.checks.distributed_data_parallel.watch import (
    FEWER,
    chain_gradients,
    tolerance,
)
from distlab.grading.clause import clause, judged_after
from distlab.grading.kit.flat import flat
from distlab.grading.kit.values import Suspect, expect_values, same_everywhere
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run

HELD_BACK = 2  # microbatches under no_sync(), before the one that is sent


def hold_back(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Microbatches under no_sync(), one outside; and again after an error in it."""
    steps = Steps(context, unit, seed)
    steps.events.clear()
    with steps.ddp.no_sync():
        with steps.ddp.no_sync():
            steps.backward(0)
        inner = len(steps.events)
        for step in range(1, HELD_BACK):
            steps.backward(step)
    events = list(steps.events)
    steps.backward(HELD_BACK)
    after = steps.gradients()
    with suppress(ZeroDivisionError), steps.ddp.no_sync():
        raise ZeroDivisionError
    steps.model.zero_grad()
    steps.backward(0)
    return {
        "events": events,
        "inner": inner,
        "after": after,
        "anew": steps.gradients(),
    }


@clause(
    "distributed_data_parallel.finish",
    "C3",
    worlds=FEWER,
    runs=[on_ranks(hold_back).when("with microbatches under no_sync()")],
)
def no_sync_keeps_quiet(runs: Runs) -> str | None:
    """No call under no_sync(); then the mean of what has come together."""
    with judged_after(mean_in_each_step, runs, "C1"):
        run = runs.finished(hold_back)
    for record in run.ranks:
        events, inner = record.value["events"], record.value["inner"]
        sent = [e for e in events if e[0] == "call"]
        if sent and not any(e[0] == "call" for e in events[:inner]):
            raise NotYetError(
                f"in nested no_sync() blocks, rank {record.rank} calls "
                f"comm.{sent[0][1]} between the ends of the inner and the outer block, "
                "expected no call",
                rule="at its end, a block sets self.syncs to what it was before",
            )
        if sent:
            raise NotYetError(
                f"under no_sync(), rank {record.rank} calls comm.{sent[0][1]}, "
                "expected no call",
                slug="synced-every-microbatch",
                rule="on_gradient reads self.syncs: set it to False in the block",
            )
    with judged_after(mean_in_each_step, runs, "C1"):
        _expect_held_back(run, runs.seed)
    return f"{HELD_BACK} microbatches without a message, then one step's"


def _expect_held_back(run: Run, seed: int) -> None:
    """The mean of all microbatches; and after an error, that of the next one."""
    n = run.world_size
    parts = [
        [flat(each) for each in chain_gradients(seed, step, n)]
        for step in range(HELD_BACK + 1)
    ]
    by_rank = [torch.stack([part[rank] for part in parts]) for rank in range(n)]
    last = torch.stack(parts[HELD_BACK]).mean(0)
    sums = [own.sum(0) for own in by_rank]
    mean = torch.stack(sums).mean(0)
    actual = all_there([value["after"] for value in run.values])
    expect_values(
        actual,
        same_everywhere(mean, n),
        what=f"after {HELD_BACK} microbatches under no_sync() and one outside, .grad",
        tolerance=tolerance(n),
        suspects=[
            Suspect(
                slug="last-microbatch-only",
                values=same_everywhere(last, n),
                sentence=f"after {HELD_BACK} microbatches under no_sync() and one "
                "outside, .grad has the last gradient only, expected the sum of all",
            ),
            Suspect(
                slug="never-synced",
                values=sums,
                sentence="after a no_sync() block, every rank keeps its own sum in "
                ".grad, expected the mean over the ranks",
                rule="at its end, no_sync() must restore self.syncs",
            ),
        ],
        rule="pack all of .grad",
    )
    first = torch.stack(parts[0])
    expect_values(
        all_there([value["anew"] for value in run.values]),
        same_everywhere(first.mean(0), n),
        what="in the step after an error under no_sync(), .grad",
        tolerance=tolerance(n),
        suspects=[
            Suspect(
                slug="never-synced",
                values=list(first),
                sentence="in the step after an error under no_sync(), every rank keeps "
                "its own gradient, expected the mean",
                rule="restore self.syncs in a finally",
            )
        ],
    )
