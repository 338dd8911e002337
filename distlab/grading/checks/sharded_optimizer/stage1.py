"""Checks of 3.13, `sharded_optimizer.stage1`: weights, memory, and bytes sent."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from distlab.grading.checks.sharded_optimizer import scenarios
from distlab.grading.checks.sharded_optimizer.half import expect_bytes, expect_weights
from distlab.grading.checks.sharded_optimizer.mistakes import suspects_of
from distlab.grading.checks.sharded_optimizer.scenarios import One
from distlab.grading.clause import clause
from distlab.grading.kit.flat import flat
from distlab.grading.kit.messages import expect_sent
from distlab.grading.kit.values import (
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import Run
from distlab.runner.autopsy import Evidence

WORLDS = (3, 2, 4, 1)
TASK = "sharded_optimizer.stage1"


# ── C1 ──────────────────────────────────────────────────────────────────────────────


@clause(TASK, "C1", worlds=WORLDS, runs=[on_ranks(scenarios.train_stage1)])
def weights_of_one_process(runs: Runs) -> str | None:
    """The weights after each step."""
    run, n = runs.finished(scenarios.train_stage1), runs.world_size
    one = One(runs.seed)
    for step in range(scenarios.STEPS):
        left_out = scenarios.LEFT_OUT[1] if step == scenarios.LEFT_OUT[0] else None
        gradients = one.gradients(step, n, left_out)
        one.step(scenarios.mean_of(gradients))
        found: list[Tensor] = [
            flat(value["steps"][step]["weights"]) for value in run.values
        ]
        right = same_everywhere(flat(scenarios.weights_of(one.model)), n)
        expect_values(
            found,
            right,
            what=f"after step {step + 1}, the weights",
            verb="are",
            suspects=() if step else partial(suspects_of, runs.seed, gradients),
            rule="each shard gets the mean gradient, the optimizer updates each shard, "
            "and all ranks gather all shards",
        )
        expect_equal_bits(
            found,
            what="the weights",
            verb="are",
            slug="weights-not-gathered",
            rule="every rank receives the new weights of a shard from the rank that "
            "owns it",
        )
        if step == 0:
            _expect_settings(run, one)
            _expect_numbers(run, one)
    expect_weights(run)
    sent = [sum(sum(step["sent"]) for step in value["steps"]) for value in run.values]
    expect_sent(run, sent, "the weights are correct, but comm was not used")
    return None


def _expect_settings(run: Run, one: One) -> None:
    """Every entry of a group, whatever it is called, is there for its shards."""
    named = scenarios.trained(one.model)
    for record in run.ranks:
        for name, settings in record.value["settings"].items():
            right = next(
                group
                for group in one.optimizer.param_groups
                if any(p is named[name] for p in group["params"])
            )
            for key, value in right.items():
                if key != "params" and settings.get(key) != value:
                    raise NotYetError(
                        f"rank {record.rank}'s optimizer has {key} = "
                        f"{settings.get(key)} for {name}, expected {value} as in its "
                        "group",
                        slug="group-settings-lost",
                        rule="copy every entry of a group; replace only params",
                    )


def _expect_numbers(run: Run, one: One) -> None:
    """Group i of the optimizer is group i of the caller, even if it is empty."""
    named = scenarios.trained(one.model)
    right = [
        [],
        [name for name, p in named.items() if p.dim() > 1],
        [name for name, p in named.items() if p.dim() < 2],
    ]
    for record in run.ranks:
        found = record.value["numbered"]
        if len(found) != len(right):
            raise NotYetError(
                f"with {len(right)} parameter groups, the first with nothing to train, "
                f"rank {record.rank}'s optimizer has {len(found)} "
                f"group{'s' * (len(found) != 1)}, expected {len(right)}",
                slug="group-settings-lost",
                rule="keep an empty group, too: a scheduler finds groups by number",
            )
        for number, (own, names) in enumerate(zip(found, right, strict=True)):
            if odd := sorted({*own} - {*names}):
                raise NotYetError(
                    f"with {len(right)} groups of the same lr, group {number} on rank "
                    f"{record.rank} has {odd[0]}, which belongs to another group",
                    slug="group-settings-lost",
                    rule="a bucket belongs to the group that is bucket.group",
                )


# ── C2 ──────────────────────────────────────────────────────────────────────────────


@clause(TASK, "C2", worlds=WORLDS, runs=[on_ranks(scenarios.train_stage1)])
def a_shard_of_the_state(runs: Runs) -> str | None:
    """After a step, everything that is alive: the weights, and a shard of state."""
    run, n = runs.finished(scenarios.train_stage1), runs.world_size
    whole, shard = scenarios.elements(n)
    allowed = scenarios.after_step(n)
    held = [value["held"] for value in run.values]
    if max(held) > allowed:
        rank = held.index(max(held))
        numbers = run.values[rank]["state"]
        if numbers > shard:
            sentence = (
                f"rank {rank} keeps {numbers} elements of optimizer state, expected "
                f"{shard}, those of its shards"
            )
            raise _too_much(
                run,
                allowed,
                sentence,
                "state-not-sharded",
                "give the optimizer bucket.shard, and no other parameter",
            )
        raise _too_much(
            run,
            allowed,
            f"after a step, rank {rank} holds {max(held)} bytes, expected the "
            f"{8 * (whole + shard)} of the weights and its shard of the state",
            "",
            "free temporary copies before the step returns",
        )
    return f"n = {n}: {max(held)} bytes after a step, unsharded {16 * whole}"


def _too_much(
    run: Run, allowed: int, sentence: str, slug: str, rule: str
) -> NotYetError:
    lines = [
        Evidence(
            rank,
            "holds",
            f"{value['held']} bytes, at most {allowed} expected; "
            f"{value['state']} elements of state",
        )
        for rank, value in enumerate(run.values)
    ]
    return NotYetError(sentence, slug=slug, evidence=tuple(lines), rule=rule)


# ── C3 ──────────────────────────────────────────────────────────────────────────────

SCATTER = "a rank needs its chunk of the mean gradient: reduce_scatter sends half of "
SCATTER += "what an all_reduce sends"


@clause(TASK, "C3", worlds=(3, 2, 4), runs=[on_ranks(scenarios.train_stage1)])
def no_more_than_data_parallel(runs: Runs) -> str | None:
    """What a step sends, beside an all_reduce of the gradients."""
    run, n = runs.finished(scenarios.train_stage1), runs.world_size
    whole, _ = scenarios.elements(n)
    unit = 8 * whole * (n - 1) / n
    sent = [value["steps"][-1]["sent"] for value in run.values]
    worst = max(sent, key=sum)
    if sum(worst) > 2 * unit * 1.01 + scenarios.SLACK:
        reduces = worst[0] > unit * 1.01 + scenarios.SLACK
        slug = "sent-more-than-needed"
        if reduces:
            is_all_reduce = 1.9 < worst[0] / unit < 2.1
            slug = "all-reduce-then-slice" if is_all_reduce else ""
        raise NotYetError(
            f"a step sent {sum(worst) / unit / 2:.2f} times the bytes of plain data "
            "parallelism, expected no more than these",
            slug=slug,
            evidence=[
                (
                    rank,
                    "sent",
                    f"{reduce / unit:.2f} units in scatter_gradients, "
                    f"{step / unit:.2f} in step; plain data parallelism 2",
                )
                for rank, (reduce, step) in enumerate(sent)
            ],
            rule=SCATTER
            if reduces
            else "all_gather of the shards: each rank sends each chunk it owns, once",
        )
    for part, what in enumerate(("scatter_gradients", "update")):
        expect_bytes(run, [value["half"]["sent"][part] for value in run.values], what)
    return f"n = {n}: {sum(worst):.0f} bytes per rank and step, as an all_reduce sends"
