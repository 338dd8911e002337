"""Checks of 3.2: one chunk of the sum on each rank."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from distlab.grading.checks.ring_allreduce.bounds import read_bounds
from distlab.grading.checks.ring_allreduce.mistakes import Sums, expect_owners
from distlab.grading.checks.ring_allreduce.steps import (
    MANY,
    expect_few_steps,
    expect_ring,
    told,
)
from distlab.grading.checks.ring_allreduce.sums import (
    EMPTY,
    LENGTH,
    NOT_FINITE,
    ONE_ON_FOUR,
    TWO_ON_THREE,
    WITH_INF,
    WORLDS,
    values_of,
)
from distlab.grading.clause import clause
from distlab.grading.kit.lent import expect_own_memory, lend
from distlab.grading.runs import Runs, RunSpec, in_rounds, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext


def scatter_once(
    context: RankContext,
    unit: ModuleType,
    seed: int,
    kind: str = "uneven",
    length: int = LENGTH,
) -> dict[str, Any]:
    """One reduce_scatter, and the bounds of the chunks."""
    memory = values_of(kind, seed, context.rank, length + 2).to(context.comm.device)
    lent = lend(memory[1:-1], memory)
    owner = unit.reduce_scatter(context.comm, lent.tensor)
    return {
        **lent.left(),
        "owner": owner if isinstance(owner, int) else repr(owner)[:40],
        "bounds": read_bounds(unit.chunk_bounds(length, context.world_size)),
        "returned": None,
    }


def _scatters(world_size: int) -> list[RunSpec]:
    """Fewer elements than ranks too, and none; each on three ranks."""
    plays: list[RunSpec] = [
        on_ranks(scatter_once),
        on_ranks(scatter_once, kind="digits"),
    ]
    if world_size == 3:
        plays += [on_ranks(scatter_once, length=2).when(TWO_ON_THREE)]
        plays += [on_ranks(scatter_once, length=0).when(EMPTY)]
        plays += [on_ranks(scatter_once, kind=NOT_FINITE, length=12).when(WITH_INF)]
    if world_size == 4:
        plays += [on_ranks(scatter_once, length=1).when(ONE_ON_FOUR)]
    return plays


@clause("ring_allreduce.reduce_scatter", "C1", worlds=(*WORLDS, 7), runs=_scatters)
def own_chunk_is_the_sum(runs: Runs) -> str | None:
    """Each rank's chunk, the one it says, is the sum; no two say the same."""
    for spec in _scatters(runs.world_size):
        run = runs.finished(spec)
        expect_own_memory(run, run.values, "reduce_scatter")
        try:
            expect_owners(Sums(run), counts=_counted(runs))
        except NotYetError as failure:
            raise failure.but(situation=spec.situation) from failure
    return None


def _counted(runs: Runs) -> Sums | None:
    """The same in digits, where one can see what was added."""
    run = runs.ended(scatter_once, kind="digits")
    return Sums(run) if run.outcome == "finished" else None


SCATTER_ON_MANY = in_rounds(scatter_once, MANY, 8, length=MANY)


@clause(
    "ring_allreduce.reduce_scatter",
    "C2",
    worlds=(3, 2, 4, 7),
    runs=[on_ranks(scatter_once)],
    later=[SCATTER_ON_MANY],
)
def scatter_is_a_ring(runs: Runs) -> str | None:
    """Each rank sends n - 1 chunks, in n - 1 steps, to one neighbor."""
    n = runs.world_size
    run = runs.finished(scatter_once)
    expect_ring(run, LENGTH, halves=1)
    if n == 7:
        expect_few_steps(runs, SCATTER_ON_MANY, 1)
    return told(run, LENGTH)
