"""Checks of task 2.11, `pipeline_parallel.forward_backward`: one microbatch, one stage.

The steps are run by an executor of the checks' own, so 2.12 cannot fail them.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from distlab.grading.checks.pipeline_parallel.cases import (
    NO_GRADIENT,
    WORLDS,
    ScheduleCase,
    all_cases,
    expect_gradients,
    finished,
    plain_cases,
    run_cases,
)
from distlab.grading.clause import clause
from distlab.grading.kit.messages import expect_messages
from distlab.grading.kit.stages import make_like
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence, describe, describe_tensor, place_of


def _execute(unit: ModuleType) -> Any:
    """An executor of the checks' own, of the unit's two steps."""

    def execute(
        comm: Any, chunks: Any, schedule: Any, loss_fn: Any, microbatches: Any
    ) -> None:
        total = sum(len(inputs) for inputs, _ in microbatches)
        kept, works = {}, []
        for action in schedule:
            source, destination = unit.peers(comm, action, len(chunks))
            inputs, targets = microbatches[action.microbatch]
            key = action.chunk, action.microbatch
            if action.kind == "F":
                chunk = chunks[action.chunk]
                x, output, work = _three(
                    unit.forward_step(comm, chunk, inputs, source, destination)
                )
                if not destination:
                    output = loss_fn(output, targets) * (len(inputs) / total)
                kept[key] = x, output
            else:
                x, output = kept.pop(key)
                try:
                    work = unit.backward_step(comm, x, output, source, destination)
                except Exception as error:
                    if destination and not x.requires_grad:
                        error.args = (NO_GRADIENT,)
                    raise
            works.append(work)
        for work in works:
            if work is not None:
                work.wait()

    return execute


def _three(value: Any) -> tuple[Tensor, Tensor, Any]:
    if (
        isinstance(value, tuple)
        and len(value) == 3
        and all(isinstance(tensor, Tensor) for tensor in value[:2])
    ):
        return value
    raise TypeError(
        "forward_step must return x, output and the Work of the send (or None), not "
        f"{value!r:.60}"
    )


def run_steps(
    context: RankContext, unit: ModuleType, seed: int
) -> list[dict[str, Any]]:
    """A schedule in which even a blocking send finds its receiver."""
    return run_cases(context, unit, seed, plain_cases, _execute(unit))


def run_any_order(
    context: RankContext, unit: ModuleType, seed: int
) -> list[dict[str, Any]]:
    """Schedules that need several messages in flight."""
    return run_cases(context, unit, seed, all_cases, _execute(unit))


@clause(
    "pipeline_parallel.forward_backward",
    "C1",
    worlds=WORLDS,
    runs=[on_ranks(run_steps)],
)
def there_and_back(runs: Runs) -> str | None:
    """Each stage's gradients, one microbatch after the other."""
    run = finished(runs, run_steps, plain_cases)
    cases, worst = plain_cases(runs.world_size), 0.0
    for number, case in enumerate(cases):
        actual = [value[number]["gradients"] for value in run.values]
        worst = max(worst, expect_gradients(case, actual, runs.seed))
    expect_messages(run, "the gradients are right, but not through comm")
    _expect_all_digits(run, cases)
    return f"n = {runs.world_size}: gradients {worst:.0e} from a single process's"


def _expect_all_digits(run: Run, cases: list[ScheduleCase]) -> None:
    """What is sent has as many bytes as the tensors that the stages have there."""
    n = run.world_size
    samples = sum(sum(case.sizes) for case in cases)
    for record in run.ranks:
        for dst in {record.rank - 1, record.rank + 1} & set(range(n)):
            needed = samples * make_like(n, max(record.rank, dst)).nbytes
            calls = [call for call in record.calls() if call.get("dst") == dst]
            sent = sum(call["bytes"] for call in calls)
            if sent < needed:
                raise NotYetError(
                    f"rank {record.rank} sends {sent} bytes to rank {dst}, expected "
                    f"{needed}, as many as the stage's tensors have in their dtype",
                    evidence=tuple(
                        Evidence(
                            rank=record.rank,
                            state="sent",
                            text=f"{describe(call)} {describe_tensor(call)}",
                            where=place_of(call),
                        )
                        for call in calls[:3]
                    ),
                )


@clause(
    "pipeline_parallel.forward_backward",
    "C2",
    worlds=(3, 2, 4),
    runs=[on_ranks(run_any_order)],
)
def any_order(runs: Runs) -> str | None:
    """Several microbatches in flight; a stage runs once for each."""
    run = finished(runs, run_any_order, all_cases)
    cases = all_cases(runs.world_size)
    for number, case in enumerate(cases):
        actual = [value[number]["gradients"] for value in run.values]
        expect_gradients(case, actual, runs.seed)
        _expect_one_forward(case, [value[number]["runs"] for value in run.values])
    return f"n = {runs.world_size}: {', '.join(case.name for case in cases)}"


def _expect_one_forward(case: ScheduleCase, runs: list[int]) -> None:
    enough = len(case.sizes) * case.num_chunks
    if max(runs) > enough:
        raise NotYetError(
            f"{case.said} rank {runs.index(max(runs))} runs {max(runs)} forwards, "
            f"expected {enough}: one per microbatch and chunk",
            slug="stage-runs-again",
            evidence=[
                (rank, "runs", f"{count} forwards") for rank, count in enumerate(runs)
            ],
            rule="return the output of the forward: backward_step starts at it",
        )
