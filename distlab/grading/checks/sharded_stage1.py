"""Checks of 3.13, `sharded_optimizer.stage1`: weights, memory, and the norm."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from distlab.grading.checks import sharded_runs as runs
from distlab.grading.checks.messages import expect_sent
from distlab.grading.checks.sharded_mistakes import owner_of_each, suspects_of
from distlab.grading.checks.sharded_runs import One, flat
from distlab.grading.clause import clause
from distlab.grading.harness import Implementation, RankHarness
from distlab.grading.oracles import (
    Suspect,
    all_close,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import Run
from distlab.runner.autopsy import Evidence

WORLDS = (3, 2, 4, 7, 1)
PLAIN = 2  # steps that are not clipped
TASK = "sharded_optimizer.stage1"


def found_after(run: Run, step: int) -> list[Tensor]:
    """Each rank's weights after a step, end to end."""
    return [flat(value["steps"][step]["weights"]) for value in run.values]


# ── C1 ──────────────────────────────────────────────────────────────────────────────


@clause(TASK, "C1", worlds=WORLDS)
def weights_of_one_process(impl: Implementation, harness: RankHarness) -> str | None:
    """V and X: the weights after two steps that are not clipped."""
    run, n = harness.run(impl, runs.train_stage1), harness.world_size
    one = One(harness.seed)
    for step in range(PLAIN):
        gradients = one.gradients(step, n)
        one.step(runs.mean_of(gradients))
        found = found_after(run, step)
        right = same_everywhere(flat(runs.weights_of(one.model)), n)
        expect_values(
            found,
            right,
            what=f"after step {step + 1} the weights",
            verb="are",
            suspects=() if step else partial(suspects_of, harness.seed, gradients),
            rule="the mean gradient to each shard, a step of each shard, all shards to "
            "all ranks",
        )
        expect_equal_bits(
            found,
            what="the weights",
            slug="weights-not-gathered",
            rule="every rank has its shard's new weights from the rank that owns it",
        )
    sent = [value["sent"] for value in run.values]
    expect_sent(run, sent, "the weights are right, but not by way of comm")
    return None


# ── C2 ──────────────────────────────────────────────────────────────────────────────


@clause(TASK, "C2", worlds=WORLDS)
def a_shard_of_the_state(impl: Implementation, harness: RankHarness) -> str | None:
    """M: after a step, everything that is alive: the weights, and a shard of state."""
    run, n = harness.run(impl, runs.train_stage1), harness.world_size
    whole, shard = runs.elements(n)
    allowed = runs.after_step(n)
    held = [value["held"] for value in run.values]
    if max(held) > allowed:
        rank = held.index(max(held))
        numbers = run.values[rank]["state"]
        if numbers > shard:
            sentence = (
                f"rank {rank} keeps {numbers} numbers of state, its shards have {shard}"
            )
            raise _too_much(
                run,
                allowed,
                sentence,
                "state-not-sharded",
                "hand the optimizer bucket.shard, and nothing else",
            )
        raise _too_much(
            run,
            allowed,
            f"after a step rank {rank} holds {max(held)} bytes; the weights and its "
            f"part of the state are {8 * (whole + shard)}",
            "",
            "what has been used must not be kept",
        )
    return f"n = {n}: {max(held)} bytes after a step, unsharded {16 * whole // n * n}"


def _too_much(
    run: Run, allowed: int, sentence: str, slug: str, rule: str
) -> NotYetError:
    lines = [
        Evidence(
            rank=rank,
            state="holds",
            text=f"{value['held']} bytes, at most {allowed} expected; "
            f"{value['state']} numbers of state",
        )
        for rank, value in enumerate(run.values)
    ]
    return NotYetError(sentence, slug=slug, evidence=tuple(lines), rule=rule)


# ── C3 ──────────────────────────────────────────────────────────────────────────────


@clause(TASK, "C3", worlds=WORLDS)
def one_norm_for_all(impl: Implementation, harness: RankHarness) -> str | None:
    """V and X: the norm that clip returns, and the weights after clipping."""
    run, n = harness.run(impl, runs.train_stage1), harness.world_size
    one = One(harness.seed)
    for step in range(PLAIN):
        one.step(runs.mean_of(one.gradients(step, n)))
    right = same_everywhere(flat(runs.weights_of(one.model)), n)
    if not all_close(found_after(run, PLAIN - 1), right):
        raise NotJudgedError("without clipping first: see C1")
    for step in range(PLAIN, runs.STEPS):
        gradient = runs.mean_of(one.gradients(step, n))
        one.step(gradient, runs.MAX_NORM[step])
        _expect_norm(run, step, gradient, one.norms[step])
        expect_values(
            found_after(run, step),
            same_everywhere(flat(runs.weights_of(one.model)), n),
            what=f"the norm is right, but after step {step + 1}, clipped to "
            f"{runs.MAX_NORM[step]:g}, the weights",
            verb="are",
            rule="longer than max_norm: every shard's gradient times max_norm / norm; "
            "shorter: as it is",
        )
    return None


def _expect_norm(run: Run, step: int, gradient: dict[str, Tensor], norm: float) -> None:
    told = [value["steps"][step]["norm"] for value in run.values]
    odd = [value for value in told if not isinstance(value, int | float)]
    if odd:
        raise NotYetError(
            f"clip gives {type(odd[0]).__name__}, not a number",
            rule="float(…) makes a number of a tensor with one element",
        )
    n, seed = run.world_size, 0
    owners, values = owner_of_each(seed, n), flat(gradient)
    parts = [values[owners == rank].norm() for rank in range(n)]
    clipped = min(norm, runs.MAX_NORM[step])
    rule = "the squares of all elements of all shards add up; the root comes last"
    numbers = [torch.tensor([value], dtype=torch.float64) for value in told]
    expect_values(
        numbers,
        same_everywhere(torch.tensor([norm], dtype=torch.float64), n),
        what=f"in step {step + 1} the norm that clip gives",
        suspects=[
            Suspect(
                slug="norm-of-own-shard",
                values=[part.reshape(1) for part in parts],
                sentence="clip gives the norm of this rank's shards only",
                rule=rule,
            ),
            Suspect(
                slug="norms-added",
                values=same_everywhere(torch.stack(parts).sum().reshape(1), n),
                sentence="clip gives the sum of the ranks' norms",
                rule=rule,
            ),
            Suspect(
                slug="norm-after-clipping",
                values=same_everywhere(torch.tensor([clipped], dtype=torch.float64), n),
                sentence="clip gives the norm after clipping",
                rule="keep the norm that decides, and return that",
            ),
        ],
        rule=rule,
    )
    expect_equal_bits(
        numbers,
        what="the norm",
        slug="own-order-sum",
        rule="all ranks must add the squares in the same order, or take one's sum",
    )
