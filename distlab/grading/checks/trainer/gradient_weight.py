"""Checks of task 1.12, `trainer.gradient_weight`: the mean over samples, not ranks."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from distlab.comm import COLLECTIVES
from distlab.grading.checks.trainer.gradient_weight_runs import (
    FROZEN,
    OVERFLOWN,
    STALE,
    UNUSED,
    Branches,
    average_uneven,
    average_with_gaps,
    counts_of,
    many,
    uses_right,
    weigh,
)
from distlab.grading.clause import clause
from distlab.grading.kit.by_name import State, listed, some_of
from distlab.grading.kit.flat import flat
from distlab.grading.kit.uneven import left_early, run_or_name
from distlab.grading.kit.values import expect_values, same_everywhere
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import Run
from distlab.runner.autopsy import evidence

# Three first: the plain mean, a hard-coded 2 and n - 1 all differ there.
WORLDS = (3, 2, 4, 7, 1)
UNEVEN = (3, 4, 7, 1)  # so three ranks have most runs: what a rank sends is seen there
ZEROS = "a rank without samples adds zeros, whatever its .grad holds"
DIFFERENT = "with a different number of samples on each rank"
NO_SAMPLES = "when no rank has a sample"
WITH_GAPS = "with unused layers or ranks without samples"


@clause("trainer.gradient_weight", "C1", worlds=WORLDS, runs=[on_ranks(weigh)])
def the_share_of_all_samples(runs: Runs) -> str | None:
    """The weights are the counts by their sum."""
    n = runs.world_size
    empty = [r for r, count in enumerate(counts_of(n, empty=True)) if not count]
    name = partial(left_early, empty=empty, why="has no samples")
    try:
        run = run_or_name(runs, weigh, name)
    except NotYetError as error:
        if "ZeroDivisionError" in error.message:
            rule = "with no sample on any rank the weight is 0.0"
            raise error.but(rule=rule) from error
        raise
    silent = [rank for rank, value in enumerate(run.values) if None in value]
    if silent:
        raise NotYetError(
            f"gradient_weight returned no number on rank {silent[0]}, expected a float "
            "on every rank",
            slug="returned-none",
            rule="return this rank's fraction of all samples, a float",
        )
    found = [torch.tensor(value, dtype=torch.float64) for value in run.values]
    for at, counts in enumerate((counts_of(n), counts_of(n, empty=True))):
        parts = torch.tensor(counts, dtype=torch.float64) / sum(counts)
        try:
            expect_values(
                [weights[at] for weights in found],
                list(parts),
                what=f"for sample counts {counts}, the weight",
            )
        except NotYetError as error:
            if error.slug != "wrong-dtype":
                raise
            raise error.but(
                rule="torch divides integers in float32: divide by int(total), "
                "which Python does in 64 bits"
            ) from error
    expect_values(
        [weights[2:3] for weights in found],
        same_everywhere(torch.zeros(1, dtype=torch.float64), n),
        what=f"{NO_SAMPLES}, the weight",
    )
    _expect_exact([weights[3:] for weights in found], many(n))
    return None


def _expect_exact(found: list[Tensor], counts: list[int]) -> None:
    large = torch.tensor(counts, dtype=torch.float64)
    try:
        expect_values(
            found,
            list((large / large.sum()).reshape(len(counts), 1)),
            what="for sample counts above 2^24, the weight",
            tolerance=1e-12,
        )
    except NotYetError as error:
        rule = "add the counts up in int64 or float64: float32 counts to 2^24 only"
        raise error.but(rule=error.rule or rule) from error


@clause(
    "trainer.gradient_weight",
    "C2",
    worlds=UNEVEN,
    runs=[on_ranks(average_uneven).when(DIFFERENT)],
)
def the_mean_over_samples(runs: Runs) -> str | None:
    """With unequal counts each gradient is that of all samples together."""
    counts = counts_of(runs.world_size)
    run = runs.finished(average_uneven)
    _expect_mean(run, counts)
    return None


@clause(
    "trainer.gradient_weight",
    "C3",
    worlds=WORLDS,
    runs=[on_ranks(average_with_gaps).when(WITH_GAPS)],
)
def everyone_takes_part(runs: Runs) -> str | None:
    """Ranks without samples or gradients; frozen parameters stay frozen."""
    n = runs.world_size
    counts = counts_of(n, empty=True)
    empty = [rank for rank, count in enumerate(counts) if not count]

    def name(run: Run) -> NotYetError | None:
        left = left_early(run, empty, "has no samples")
        own = _averaged(n, runs.seed, counts, empty_too=False)
        all_ = _averaged(n, runs.seed, counts, empty_too=True)
        return left or _skipped_none(run, own) or _skipped_none(run, all_)

    try:
        run = run_or_name(runs, average_with_gaps, name)
    except NotYetError as error:
        if "NoneType" in error.message:
            rule = "a rank without samples, or without a layer's, has .grad None"
            raise error.but(rule=rule) from error
        raise
    for rank, value in enumerate(run.values):
        if FROZEN in value["after"]:
            raise NotYetError(
                f"after average_weighted, the frozen {FROZEN} has a .grad on rank "
                f"{rank}, expected None",
                slug="frozen-gradient",
                rule="skip parameters with requires_grad=False: an optimizer updates "
                "every parameter that has a .grad",
            )
    _expect_mean(run, counts)
    return None


def _expect_mean(run: Run, counts: list[int]) -> None:
    own = [value["own"] for value in run.values]
    _expect_finite(run)
    names = list(dict.fromkeys(name for state in own for name in state))
    after = [_used(value["after"]) for value in run.values]
    for rank, state in enumerate(after):
        missing = [name for name in names if name not in state]
        if missing:
            samples = f"{counts[rank] or 'no'} sample{'s' * (counts[rank] != 1)}"
            raise NotYetError(
                f"after average_weighted, .grad of {listed(missing)} is None on rank "
                f"{rank}, which has {samples}, expected the mean",
                slug="none-gradient-skipped",
                rule="every rank needs the mean, also where .grad was None",
            )
    zeros = {name: torch.zeros_like(after[0][name]) for name in names}
    own = [{**zeros, **state} for state in own]
    after = [{name: state[name] for name in names} for state in after]
    mean = {
        name: sum(c * state[name] for c, state in zip(counts, own, strict=True))
        / sum(counts)
        for name in names
    }
    expect_values(
        [flat(state) for state in after],
        same_everywhere(flat(mean), run.world_size),
        what=some_of(f"for sample counts {counts}, the averaged gradient", mean, after),
    )


def _expect_finite(run: Run) -> None:
    """An infinite gradient of an old step does not vanish when it is weighted by 0."""
    after = [g for value in run.values for g in _used(value["after"]).values()]
    old = [rank for n, rank in OVERFLOWN if n == run.world_size]
    if old and any(not gradient.isfinite().all() for gradient in after):
        raise NotYetError(
            f"rank {old[0]} has no samples, but its old, infinite .grad is in the "
            f"average, expected rank {old[0]} to add zeros",
            slug="stale-gradient",
            rule=ZEROS,
        )


def _averaged(
    n: int, seed: int, counts: list[int], *, empty_too: bool
) -> list[dict[str, int]]:
    """What each rank averages, with its size, if it skips what has no gradient.

    With `empty_too` a rank without samples has put zeros everywhere.
    """
    model = Branches(seed)
    wanted = {
        name: p.numel() for name, p in model.named_parameters() if p.requires_grad
    }
    stale = STALE.get(n, ())
    return [
        dict(wanted)
        if empty_too and not count
        else {
            name: size
            for name, size in wanted.items()
            if (count or rank in stale)
            and name not in UNUSED
            and (uses_right(n, rank) or not name.startswith("right"))
        }
        for rank, count in enumerate(counts)
    ]


def _used(state: State) -> State:
    """Without what no sample has used: None or zeros, both are right there."""
    return {
        name: gradient
        for name, gradient in state.items()
        if name not in UNUSED or bool(gradient.any())
    }


def _skipped_none(run: Run, present: list[dict[str, int]]) -> NotYetError | None:
    """Every rank averages what it has a gradient for, and they have not the same.

    `present` has, for each rank, those parameters with their number of elements.
    """
    dtypes = {
        str(call["dtype"])
        for record in run.ranks
        for call in record.calls()
        if call["op"] in COLLECTIVES and math.prod(call["shape"] or []) > 1
    }
    if len(dtypes) > 1:
        return None  # the misfit is another one
    for record, sizes in zip(run.ranks, present, strict=True):
        called = [
            math.prod(call["shape"] or [])
            for call in record.calls()
            if call["op"] in COLLECTIVES
        ]
        vectors = [size for size in called if size > 1]
        one_by_one = [size for size in sizes.values() if size > 1][: len(vectors)]
        if vectors not in (one_by_one, [sum(sizes.values())]):
            return None
    names = max(present, key=len)
    for rank, own in enumerate(present):
        lacks = next((name for name in names if name not in own), "")
        if lacks:
            return NotYetError(
                f"rank {rank} skips {lacks}, whose .grad is None there, but rank "
                f"{present.index(names)} averages it, expected zeros from rank {rank}",
                slug="none-gradient-skipped",
                evidence=evidence(run),
                rule="where .grad is None a rank adds zeros: the calls are the same "
                "on every rank",
                fatal=True,
            )
    return None
