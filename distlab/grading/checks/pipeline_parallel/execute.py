"""Checks of task 2.12, `pipeline_parallel.execute`: gradients and loss."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

from distlab.grading.checks.pipeline_parallel.cases import (
    WORLDS,
    all_cases,
    expect_gradients,
    finished,
    gradients,
    guesses_of,
    run_cases,
)
from distlab.grading.checks.pipeline_parallel.losses import (
    Holder,
    expect_no_graph_in_the_loss,
)
from distlab.grading.clause import clause
from distlab.grading.kit.messages import expect_messages
from distlab.grading.kit.returned import expect_loss
from distlab.grading.runs import Runs, on_ranks
from distlab.runner import RankContext, Run


def run_schedules(
    context: RankContext, unit: ModuleType, seed: int, look: bool = False
) -> list[dict[str, Any]]:
    """Each case, on fresh stages; each is reported as it begins."""
    return run_cases(context, unit, seed, all_cases, unit.execute, look)


@clause(
    "pipeline_parallel.execute", "C1", worlds=WORLDS, runs=[on_ranks(run_schedules)]
)
def gradients_of_the_mean_loss(runs: Runs) -> str | None:
    """Every stage's gradients, for any schedule."""
    run = finished(runs, run_schedules, all_cases)
    cases, worst = all_cases(runs.world_size), 0.0
    for number, case in enumerate(cases):
        actual = [value[number]["gradients"] for value in run.values]
        worst = max(worst, expect_gradients(case, actual, runs.seed))
    expect_messages(run, "the gradients are right, but not through comm")
    names = ", ".join(case.name for case in cases)
    n = runs.world_size
    return f"n = {n}: {names}: gradients {worst:.0e} from a single process's"


@clause(
    "pipeline_parallel.execute",
    "C2",
    worlds=WORLDS,
    runs=[on_ranks(run_schedules)],
    later=[on_ranks(run_schedules, look=True)],
)
def loss_on_every_rank(runs: Runs) -> str | None:
    """The mean loss over all samples, on every rank; M: its sum holds no graph."""
    run = finished(runs, run_schedules, all_cases)
    n, seed = runs.world_size, runs.seed
    for number, case in enumerate(all_cases(n)):
        loss = gradients(case, seed, n)[1]
        expect_loss(
            [value[number]["loss"] for value in run.values],
            loss,
            f"with {case.name} and a smaller last microbatch, the returned loss",
            partial(guesses_of, case, seed, n),
        )
    expect_no_loss_kept(runs, run)
    return None


def expect_no_loss_kept(runs: Runs, run: Run) -> None:
    """Neither the sum nor a list of the losses holds the microbatches' graphs.

    Raises:
        NotYetError: one does; with its name and its line.
    """

    def look(number: int) -> Holder:
        last = runs.finished(run_schedules, look=True).values[-1]
        holder: Holder = last[number]["holder"]
        return holder

    for number, case in enumerate(all_cases(runs.world_size)):
        report = [value[number] for value in run.values]
        expect_no_graph_in_the_loss(case, report, partial(look, number))
