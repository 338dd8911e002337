"""Checks of task 2.23, `activation_checkpointing.port`: as 2.5, and autograd.grad."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import nn

from distlab.digests import digest
from distlab.grading.checks.activation_checkpointing.checkpoint import (
    DROPOUT,
    ROWS,
    WIDTH,
    expect_inputs_only,
    expect_same_bits,
    expect_same_random_numbers,
    make_blocks,
    there_and_back,
)
from distlab.grading.clause import clause
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run

WORLDS = (2, 1)  # nothing is sent; two ranks draw different numbers
NON_REENTRANT = "use_reentrant=False keeps forward's graph, without its tensors"
RULES = {
    "parameters-without-gradient": NON_REENTRANT,
    "recomputed-with-other-numbers": "leave preserve_rng_state at its default, True",
}


def ported_blocks(
    context: RankContext, unit: ModuleType, seed: int, dropout: float = 0.0
) -> dict[str, Any]:
    """As in 2.5, with `with_torch` in the place of `checkpoint`."""
    theirs = cast(ModuleType, SimpleNamespace(checkpoint=unit.with_torch))
    return there_and_back(context, theirs, seed, dropout)


def asked_for(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """The gradients from torch.autograd.grad, without and with `with_torch`."""
    found: dict[str, Any] = {}
    for name, run in (("plain", lambda block, x: block(x)), ("again", unit.with_torch)):
        blocks = make_blocks(seed, 0.0)
        generator = torch.Generator().manual_seed(seed * 7919 + context.rank)
        start = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        start.requires_grad_()
        middle = start
        for block in blocks:
            middle = run(block, middle)
        wanted = [start, *nn.ModuleList(blocks).parameters()]
        try:
            found[name] = torch.autograd.grad(middle.square().sum(), wanted)
        except RuntimeError as error:
            found["refused"] = str(error).partition(". ")[0]
        found["written"] = sum(tensor.grad is not None for tensor in wanted)
    return found


@clause(
    "activation_checkpointing.port",
    "C1",
    worlds=WORLDS,
    runs=lambda _: _WITH_DROPOUT,
)
def same_bits(runs: Runs) -> str | None:
    """Bit by bit, then the same with dropout; later random numbers, too."""
    said = _in_torchs_words(expect_same_bits, runs.finished(ported_blocks))
    dropped = runs.finished(ported_blocks, dropout=DROPOUT)
    _in_torchs_words(expect_same_random_numbers, dropped)
    return f"{said}, also with dropout {DROPOUT}"


_WITH_DROPOUT: list[RunSpec] = [
    on_ranks(ported_blocks),
    on_ranks(ported_blocks, dropout=DROPOUT),
]


def _in_torchs_words(expect: Callable[[Run], str], run: Run) -> str:
    """What task 2.5 expects; the rules are about the call of torch's function."""
    try:
        return expect(run)
    except NotYetError as failure:
        rule = "expected: block(tensor), recomputed by torch in backward"
        raise failure.but(rule=RULES.get(failure.slug, rule)) from failure


@clause(
    "activation_checkpointing.port", "C2", worlds=WORLDS, runs=[on_ranks(asked_for)]
)
def asked_by_name(runs: Runs) -> str | None:
    """torch.autograd.grad gives the bits that it gives without checkpointing."""
    run = runs.finished(asked_for)
    for rank, value in enumerate(run.values):
        if "refused" in value:
            raise NotYetError(
                f"torch.autograd.grad raised RuntimeError on rank {rank}: "
                f"{value['refused']}",
                slug="backward-inside-backward",
                rule=NON_REENTRANT,
            )
        differ = not all(map(torch.equal, value["again"], value["plain"]))
        if value["written"] or differ:
            others = " and returned other gradients" * differ
            raise NotYetError(
                f"torch.autograd.grad wrote the .grad of {value['written']} tensors on "
                f"rank {rank}{others}, expected it to only return gradients",
                slug="backward-inside-backward",
                evidence=[
                    (
                        rank,
                        "bits",
                        f"without {digest(*value['plain'])}   "
                        f"with_torch {digest(*value['again'])}",
                    )
                ],
                rule=NON_REENTRANT,
            )
    return None


@clause(
    "activation_checkpointing.port", "C3", worlds=WORLDS, runs=[on_ranks(ported_blocks)]
)
def inputs_kept_only(runs: Runs) -> str | None:
    """As in task 2.5."""
    run = runs.finished(ported_blocks)
    try:
        return expect_inputs_only(run)
    except NotYetError as failure:
        if failure.fatal:
            raise NotJudgedError("no tensor was returned: see C1") from None
        rule = "call torch.utils.checkpoint.checkpoint once for each block"
        raise failure.but(rule=rule) from failure
