"""Checks of 3.16, `sharded_optimizer.stage2`: weights, bytes sent, gradients held."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from distlab.grading.checks.sharded_optimizer import scenarios
from distlab.grading.checks.sharded_optimizer.half import expect_bytes, expect_weights
from distlab.grading.checks.sharded_optimizer.mistakes import suspects_of
from distlab.grading.checks.sharded_optimizer.moments import expect_freed
from distlab.grading.checks.sharded_optimizer.scenarios import One
from distlab.grading.checks.sharded_optimizer.stage1 import SCATTER, WORLDS
from distlab.grading.clause import clause
from distlab.grading.kit.flat import flat
from distlab.grading.kit.messages import expect_sent
from distlab.grading.kit.values import (
    Suspect,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import Run

TASK = "sharded_optimizer.stage2"
PARTS = scenarios.STAGE2_PARTS


def gradients_in_step(one: One, step: int, n: int) -> list[list[dict[str, Tensor]]]:
    """Of each batch of the step, each rank's gradient."""
    left_out = 0 if step == 2 and n > 1 else None
    return [one.gradients(part, n, left_out) for part in PARTS[step]]


def added(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Their sum, name by name."""
    total = dict(gradients[0])
    for gradient in gradients[1:]:
        total = {name: total[name] + gradient[name] for name in total}
    return total


# ── C1 ──────────────────────────────────────────────────────────────────────────────


@clause(TASK, "C1", worlds=WORLDS, runs=[on_ranks(scenarios.train_stage2)])
def weights_of_one_process(runs: Runs) -> str | None:
    """After each step; the second adds up the gradients of two backward()."""
    run, n = runs.finished(scenarios.train_stage2), runs.world_size
    one = One(runs.seed)
    for step in range(len(PARTS)):
        gradients = gradients_in_step(one, step, n)
        one.step(added([scenarios.mean_of(ranks) for ranks in gradients]))
        found = [flat(value["steps"][step]["weights"]) for value in run.values]
        right = same_everywhere(flat(scenarios.weights_of(one.model)), n)
        expect_values(
            found,
            right,
            what=f"after step {step + 1}{_of_two(step)}, the weights",
            verb="are",
            suspects=partial(_suspects, runs.seed, step, gradients),
            rule="add the rank's chunk of the mean gradient to bucket.shard.grad",
        )
        sent = [value["steps"][step]["sent"] for value in run.values]
        expect_sent(run, sent, "the weights are correct, but comm was not used")
    expect_weights(run)
    return None


def _of_two(step: int) -> str:
    return ", with two backward() calls" if len(PARTS[step]) > 1 else ""


def _suspects(
    seed: int, step: int, gradients: list[list[dict[str, Tensor]]]
) -> list[Suspect]:
    """What known misconceptions leave after step 1, or after step 2."""
    n = len(gradients[0])
    if step == 0:
        rules = {
            "own-gradient-only": SCATTER,
            "": "bucket.shard.grad must be this rank's chunk of the mean gradient",
        }
        return [
            replace(suspect, rule=rules.get(suspect.slug, suspect.rule))
            for suspect in suspects_of(seed, gradients[0])
        ]
    if step == 2:
        return []
    one = One(seed)
    one.step(scenarios.mean_of(one.gradients(PARTS[0][0], n)))
    one.step(scenarios.mean_of(gradients[-1]))
    twice = One(seed)
    twice.step(scenarios.mean_of(twice.gradients(PARTS[0][0], n)))
    first, second = map(scenarios.mean_of, gradients)
    twice.step(added([{name: value / n for name, value in first.items()}, second]))
    return [
        Suspect(
            slug="shard-gradient-overwritten",
            values=same_everywhere(flat(scenarios.weights_of(one.model)), n),
            sentence="of two backward() calls in a step, only the second one's "
            "gradient counted, expected both",
            rule="backward() accumulates into .grad, and reduce_bucket must, too",
        ),
        Suspect(
            slug="",
            values=same_everywhere(flat(scenarios.weights_of(twice.model)), n),
            sentence="of two backward() calls in a step, the first one's gradient was "
            f"divided by {n} twice, expected once",
            rule="divide only what is new, before you add it to bucket.shard.grad",
        ),
    ]


# ── C2 ──────────────────────────────────────────────────────────────────────────────


@clause(TASK, "C2", worlds=(3, 2, 4), runs=[on_ranks(scenarios.train_stage2)])
def half_of_an_all_reduce(runs: Runs) -> str | None:
    """What was sent until the gradients are reduced, per backward()."""
    run, n = runs.finished(scenarios.train_stage2), runs.world_size
    whole, _ = scenarios.elements(n)
    scatter = 8 * whole * (n - 1) / n
    for step, parts in enumerate(PARTS):
        # In the last step one rank leaves a parameter out: what it sends is the same.
        sent = [value["steps"][step]["sent"] / len(parts) for value in run.values]
        if max(sent) > scatter * 1.01 + scenarios.SLACK:
            ratio = max(sent) / scatter
            slug = "all-reduce-then-slice" if 1.9 < ratio < 2.1 else ""
            raise NotYetError(
                f"in step {step + 1} backward() sent {ratio:.2f} times the bytes of a "
                "reduce_scatter of the gradients, expected no more than these",
                slug=slug,
                evidence=[
                    (
                        rank,
                        "sent",
                        f"{one:.0f} bytes, a reduce_scatter sends {scatter:.0f}",
                    )
                    for rank, one in enumerate(sent)
                ],
                rule=SCATTER,
            )
    half = [value["half"]["sent"][0] for value in run.values]
    expect_bytes(run, half, "reduce_bucket")
    return f"n = {n}: {scatter:.0f} bytes of gradients per rank and backward()"


# ── C3 ──────────────────────────────────────────────────────────────────────────────


@clause(TASK, "C3", worlds=(3, 2, 4), runs=[on_ranks(scenarios.train_stage2)])
def gradients_of_the_shards(runs: Runs) -> str | None:
    """All that is alive after backward(): the weights, and shards of the rest."""
    run, n = runs.finished(scenarios.train_stage2), runs.world_size
    whole, shard = scenarios.elements(n)
    for step in (1, 0):  # in the second there is state, and a gradient to add to
        allowed = scenarios.after_backward(n, step)
        held = [value["steps"][step]["held"] for value in run.values]
        if max(held) > allowed:
            raise _whole_gradients(run, step, allowed, 8 * (whole - shard))
    expect_freed(run)
    for value in run.values:
        if value["steps"][0]["rest"] > scenarios.after_step(n):
            raise NotYetError(
                f"after zero_grad(), a rank holds {value['steps'][0]['rest']} bytes, "
                f"expected at most {scenarios.after_step(n)} without gradients",
                rule="keep a gradient in bucket.shard.grad only",
            )
    most = max(value["steps"][1]["held"] for value in run.values)
    at_stage_1 = most + 8 * (whole - shard)
    return f"n = {n}: {most} bytes after backward(), at stage 1 {at_stage_1}"


def _whole_gradients(run: Run, step: int, allowed: int, rest: int) -> NotYetError:
    held = [value["steps"][step]["held"] for value in run.values]
    rank = held.index(max(held))
    over = held[rank] - allowed + scenarios.SLACK
    looks_whole = over > 0.8 * rest
    return NotYetError(
        f"after backward(), rank {rank} holds {over} bytes too many, expected only "
        "the weights, its shards' state and their gradients",
        slug="full-gradients-kept" if looks_whole else "",
        evidence=[
            (r, "holds", f"{h} bytes, at most {allowed}") for r, h in enumerate(held)
        ],
        rule="once a rank has its chunk it needs no full gradient; a view of a chunk "
        "keeps the memory of the full vector",
    )
