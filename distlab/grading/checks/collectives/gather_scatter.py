"""Checks of task 1.14: all_gather and reduce_scatter.

Rank r's numbers are digits times 10^r, so that one can see in a wrong sum which ranks
are in it; the last of each chunk is a fraction, which float32 would round.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.grading.checks.collectives.gather_scatter_mistakes import (
    BEFORE,
    Outputs,
    judge,
    wrong_gather,
    wrong_scatter,
)
from distlab.grading.clause import clause
from distlab.grading.kit.any_tensor import (
    emptied,
    expect_each,
    finished_with_each,
    with_each,
)
from distlab.grading.kit.messages import (
    WORLDS,
    calls_of_each,
    expect_bytes,
    numbers,
)
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.terminal import ranks_in_words

ANY_WORLD = 3  # where a second call is looked at, and other dtypes
GATHERED = ((1,), (2,), (3,))
SCATTERED = tuple((size * ANY_WORLD,) for size in (1, 2, 3))
SECOND_CALL = "in two calls, the first with float64 and the second with float32"

# ── what runs in the ranks ──────────────────────────────────────────────────────────


def gather_once(
    context: RankContext, unit: ModuleType, seed: int, again: bool = False
) -> dict[str, Any]:
    """One all_gather of three numbers; or of two in float32, after another call."""
    n = context.world_size
    return _once(context, unit.all_gather, seed, inputs=1, outputs=n, again=again)


def scatter_once(
    context: RankContext, unit: ModuleType, seed: int, again: bool = False
) -> dict[str, Any]:
    """One reduce_scatter, to three numbers each; or to two, as in `gather_once`."""
    n = context.world_size
    return _once(context, unit.reduce_scatter, seed, inputs=n, outputs=1, again=again)


def _once(
    context: RankContext,
    function: Any,
    seed: int,
    *,
    inputs: int,
    outputs: int,
    again: bool,
) -> dict[str, Any]:
    size, dtype = (2, torch.float32) if again else (3, torch.float64)
    device = context.comm.device
    if again:
        other = digits(seed + 1, context.rank, 2 * inputs, 2).to(device)
        room = torch.full((2 * outputs,), BEFORE, dtype=other.dtype, device=device)
        function(context.comm, room, other)
    given = digits(seed, context.rank, size * inputs, size).to(device, dtype)
    old = torch.nan if again else BEFORE
    output = torch.full((size * outputs,), old, dtype=dtype, device=device)
    before = given.clone()
    returned = function(context.comm, output, given)
    is_tensor = isinstance(returned, Tensor)
    return {
        "before": before,
        "input": given,
        "output": output,
        "returned": returned.detach().clone() if is_tensor else None,
    }


def gather_any(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """An all_gather of one, two and three numbers of other dtypes."""

    def call(given: Tensor) -> Tensor:
        output = given.new_zeros(len(given) * context.world_size)
        unit.all_gather(context.comm, output, given)
        return output

    return with_each(context, seed, call, GATHERED)


def scatter_any(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """A reduce_scatter to one, two and three numbers of other dtypes."""
    n = context.world_size

    def call(given: Tensor) -> Tensor:
        output = emptied(given.new_ones(len(given) // n))
        unit.reduce_scatter(context.comm, output, given)
        return output

    return with_each(context, seed, call, SCATTERED, infinite=1)


def digits(seed: int, rank: int, count: int, size: int) -> Tensor:
    """`count` digits times 10^rank, with a fraction for the last of every `size`."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    values = torch.randint(1, 10, (count,), generator=generator).double()
    values *= 10.0**rank
    if size > 2:
        values[size - 1 :: size] = numbers(seed, rank, count // size)
    return values


def _calls(world_size: int) -> tuple[bool, ...]:
    """By itself, and on three ranks also after another call."""
    return (False, True) if world_size == ANY_WORLD else (False,)


def _expect_no_nan(seen: Outputs, name: str) -> None:
    """In a second call output holds nan before: what is not replaced shows."""
    with_nan = [r for r, output in enumerate(seen.outputs) if output.isnan().any()]
    if with_nan:
        raise NotYetError(
            f"`output` held nan before {name}, and it still does afterwards on rank "
            f"{with_nan[0]}, expected new values everywhere",
            evidence=calls_of_each(seen.run),
            rule="output may hold any values before the call, and 0 × nan is nan",
        )


def _expect_sent(seen: Outputs, name: str) -> None:
    """Each chunk needs n - 1 messages: to reach all ranks, or to be added up."""
    chunk = seen.inputs[0][: seen.size].nbytes
    least = seen.n * (seen.n - 1) * chunk
    expect_bytes(seen.run, least, f"{name}'s output is right")


# ── C1 all_gather ───────────────────────────────────────────────────────────────────


def _gathers(world_size: int) -> list[RunSpec]:
    more = [
        on_ranks(gather_once, again=True).when(SECOND_CALL),
        on_ranks(gather_any),
    ]
    return [on_ranks(gather_once, again=False), *more * (world_size == ANY_WORLD)]


@clause("collectives.gather_scatter", "C1", worlds=WORLDS, runs=_gathers)
def all_inputs_everywhere(runs: Runs) -> str | None:
    """On every rank, the inputs of rank 0, 1, …, in this order."""
    for again in _calls(runs.world_size):
        seen = Outputs(runs.finished(gather_once, again=again))
        expected = [torch.cat(seen.inputs)] * seen.n
        _expect_no_nan(seen, "all_gather")
        judge(seen, expected, "all_gather", wrong_gather)
        _expect_sent(seen, "all_gather")
    if runs.world_size == ANY_WORLD:
        expect_each(
            finished_with_each(runs, gather_any, GATHERED),
            lambda before: [torch.cat(before)] * len(before),
            "all_gather's output",
        )
    return None


# ── C2 reduce_scatter ───────────────────────────────────────────────────────────────


def _scatters(world_size: int) -> list[RunSpec]:
    more = [
        on_ranks(scatter_once, again=True).when(SECOND_CALL),
        on_ranks(scatter_any),
    ]
    return [on_ranks(scatter_once, again=False), *more * (world_size == ANY_WORLD)]


@clause("collectives.gather_scatter", "C2", worlds=WORLDS, runs=_scatters)
def own_chunk_of_the_sum(runs: Runs) -> str | None:
    """Rank r's output is chunk r of the sum of all inputs."""
    for again in _calls(runs.world_size):
        seen = Outputs(runs.finished(scatter_once, again=again))
        expected = list(torch.stack(seen.inputs).sum(0).chunk(seen.n))
        _expect_no_nan(seen, "reduce_scatter")
        judge(seen, expected, "reduce_scatter", wrong_scatter)
        _expect_sent(seen, "reduce_scatter")
    if runs.world_size == ANY_WORLD:
        expect_each(
            finished_with_each(runs, scatter_any, SCATTERED),
            lambda before: sum(before[1:], before[0]).chunk(len(before)),
            "reduce_scatter's output",
        )
    first, last = (seen.run.ranks[rank].sent_bytes for rank in (0, -1))
    return (
        f"n = {runs.world_size}: for a reduce_scatter of {len(seen.inputs[0])} "
        f"elements rank 0 sends {first:.0f} bytes, the last rank {last:.0f}"
    )


# ── C3 the inputs ───────────────────────────────────────────────────────────────────


@clause(
    "collectives.gather_scatter",
    "C3",
    worlds=WORLDS,
    runs=[on_ranks(gather_once, again=False), on_ranks(scatter_once, again=False)],
)
def inputs_as_they_were(runs: Runs) -> str | None:
    """No rank's input has changed, not by a bit."""
    for name, scenario in (
        ("all_gather", gather_once),
        ("reduce_scatter", scatter_once),
    ):
        run = runs.finished(scenario, again=False)
        changed = [
            rank
            for rank, value in enumerate(run.values)
            if not torch.equal(value["input"], value["before"])
        ]
        if changed:
            raise NotYetError(
                f"{name} changed the caller's input on {ranks_in_words(changed)}, "
                "expected it unchanged",
                slug="input-changed",
                evidence=calls_of_each(run),
                rule="do not modify input: add in output, or in a new tensor",
            )
    return None
