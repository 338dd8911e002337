"""Checks of 3.21 and 3.22, ZeRO's third stage: numbers, memory, bytes, and time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distlab.grading.checks.sharded_optimizer import layers
from distlab.grading.checks.sharded_optimizer.half import (
    expect_bytes,
    expect_scale,
    expect_weights,
)
from distlab.grading.checks.sharded_optimizer.moments import (
    expect_freed,
    expect_no_copy,
)
from distlab.grading.checks.sharded_optimizer.named import (
    expect_next_ahead,
    finished_run,
    kept_before,
)
from distlab.grading.checks.sharded_optimizer.scenarios import SLACK
from distlab.grading.checks.sharded_optimizer.stage1 import WORLDS
from distlab.grading.clause import clause
from distlab.grading.kit.messages import expect_messages
from distlab.grading.kit.values import Suspect, brief, close, expect_values
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import Run
from distlab.runner.autopsy import Evidence

FORWARD = "sharded_optimizer.stage3_forward"
BACKWARD = "sharded_optimizer.stage3_backward"
ROOM = layers.ROOM
SEVERAL = (3, 2, 4)


def _evidence(run: Run, key: str, allowed: float) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(r, key, f"{v[key]:.0f} bytes, at most {allowed:.0f}")
        for r, v in enumerate(run.values)
    )


# ── 3.21 C1 ─────────────────────────────────────────────────────────────────────────


@clause(FORWARD, "C1", worlds=WORLDS, runs=[on_ranks(layers.only_forward)])
def outputs_of_the_whole_model(runs: Runs) -> str | None:
    """Two forwards; in between, every rank has changed its shards."""
    run = finished_run(runs, layers.only_forward)
    model = layers.make_layers(runs.seed)
    inputs = [layers.make_inputs(runs.seed, 0, r) for r in range(run.world_size)]
    with torch.no_grad():
        before = [model(x) for x in inputs]
        for name, parameter in model.named_parameters():
            parameter.add_(layers.nudge(runs.seed, name, parameter.shape))
        after = [model(x) for x in inputs]
    expect_values(
        [value["outputs"][0] for value in run.values],
        before,
        what="in the first forward, the model's output",
    )
    expect_values(
        [value["outputs"][1] for value in run.values],
        after,
        what="in a forward after the shards have changed, the model's output",
        suspects=[
            Suspect(
                slug="old-weights-used",
                values=before,
                sentence="after the shards changed, the second forward still used the "
                "weights of the first, expected the new ones",
                rule="gathered weights are a copy: gather again before each forward",
            )
        ],
    )
    expect_messages(run, "the outputs are correct, but comm was not used")
    return None


# ── 3.21 C2 ─────────────────────────────────────────────────────────────────────────


@clause(FORWARD, "C2", worlds=SEVERAL, runs=[on_ranks(layers.only_forward)])
def one_layer_at_a_time(runs: Runs) -> str | None:
    """All that is alive: when all is set up, in each layer, and afterwards."""
    run, n = finished_run(runs, layers.only_forward), runs.world_size
    sizes = layers.layer_elements(n)
    shards = layers.shard_bytes(n)
    for rank, value in enumerate(run.values):
        if value["cut"] > shards + ROOM:
            raise NotYetError(
                f"before the first forward, rank {rank} holds {value['cut']} bytes, "
                f"expected {shards}, those of its shards",
                slug="shard-keeps-full-weights",
                evidence=_evidence(run, "cut", shards + ROOM),
                rule="a shard that is a view keeps the memory of the full vector; "
                "copy it, then free the vector",
            )
        for number, (held, size) in enumerate(zip(value["inside"], sizes, strict=True)):
            allowed = shards + 8 * n * size + ROOM
            if held > allowed:
                wanted = shards + 8 * n * size
                before, after = sum(sizes[:number]), sum(sizes[number + 1 : number + 2])
                extra = (held - wanted) / (8 * n)
                is_next = before < extra < 1.5 * after
                raise NotYetError(
                    f"while layer {number} computes, rank {rank} holds {held} bytes, "
                    f"expected {wanted}, those of its shards and this layer"
                    + ": it has gathered the next layer, too"
                    * is_next,
                    slug="" if is_next else "layers-not-freed",
                    rule=""
                    if is_next
                    else "free a layer's buckets as soon as it has computed",
                )
        if value["after"] > shards + layers.LEFT:
            raise NotYetError(
                f"after forward, rank {rank} holds {value['after']} bytes, expected "
                f"{shards}, those of its shards",
                slug="layers-not-freed",
                evidence=_evidence(run, "after", shards + layers.LEFT),
                rule="free a layer's buckets as soon as it has computed",
            )
    expect_no_copy(run, "unshard")
    expect_next_ahead(run)
    most = max(max(value["inside"]) for value in run.values)
    return f"n = {n}: at most {most} bytes, the full model has {shards * n}"


# ── 3.21 C3 ─────────────────────────────────────────────────────────────────────────


@clause(FORWARD, "C3", worlds=SEVERAL, runs=[on_ranks(layers.only_forward)])
def gathered_once(runs: Runs) -> str | None:
    """A forward sends every shard to the others once."""
    run, n = finished_run(runs, layers.only_forward), runs.world_size
    right = 8.0 * (n - 1) * sum(layers.layer_elements(n))
    _expect_sent(run, [value["sent"] for value in run.values], right, "a forward")
    expect_bytes(run, [value["half"] for value in run.values], "a forward")
    return f"n = {n}: {right:.0f} bytes per rank and forward"


def _expect_sent(run: Run, sent: list[float], right: float, what: str) -> None:
    if max(sent) <= right * 1.01 + SLACK:
        return
    raise NotYetError(
        f"{what} sent {max(sent) / right:.3g} times the bytes that are needed, "
        f"expected {right:.0f} bytes",
        slug="sent-more-than-needed",
        evidence=[
            (r, "sent", f"{s:.0f} bytes, {right:.0f} are needed")
            for r, s in enumerate(sent)
        ],
        rule="each rank sends its shard of a layer to each other rank once, when the "
        "layer is needed",
    )


# ── 3.22 C1 ─────────────────────────────────────────────────────────────────────────


def _ways(world_size: int) -> list[dict[str, Any]]:
    """Three ranks train without and with prefetch; two and four in one of the ways.

    With fewer than four every rank is the next or the last one of any other.
    """
    ways: dict[int, list[dict[str, Any]]] = {1: [{}], 2: [{}], 4: [{"prefetch": True}]}
    return ways.get(world_size, [{}, {"prefetch": True}])


def _with_prefetch(world_size: int) -> list[RunSpec]:
    return [on_ranks(layers.train_stage3, **way) for way in _ways(world_size)]


@clause(BACKWARD, "C1", worlds=WORLDS, runs=_with_prefetch)
def weights_of_one_process(runs: Runs) -> str | None:
    """The shards of all ranks, put together after each step; also with prefetch."""
    for values in _ways(runs.world_size):
        right, outputs = layers.one_process(runs.seed, runs.world_size, **values)
        run = finished_run(runs, layers.train_stage3, **values)
        how = " with prefetch" if values else ""
        for step, expected in enumerate(right):
            _expect_weights(run, step, expected, how)
        expect_values(
            [value["outputs"] for value in run.values],
            outputs,
            what=f"after the last step{how}, the output under torch.no_grad()",
        )
        if not values:
            expect_weights(run, rows=1)
            expect_scale(run)
        expect_messages(run, "the weights are correct, but comm was not used")
    return None


def _expect_weights(run: Run, step: int, expected: dict[str, Tensor], how: str) -> None:
    for index, names in enumerate(run.values[0]["names"]):
        own = torch.cat([expected[name].reshape(-1) for name in names])
        shards = [value["steps"][step]["shards"][index] for value in run.values]
        found = torch.cat(shards)[: own.numel()]
        if not close(found, own):
            if kept := kept_before(run, step):
                raise kept
            at = int((found - own).abs().nan_to_num(torch.inf).argmax())
            raise NotYetError(
                f"after step {step + 1}{how}, {' and '.join(names)} "
                f"{'has' if len(names) == 1 else 'have'} {float(found[at]):.4g} in "
                f"element {at}, expected {float(own[at]):.4g}",
                evidence=[(0, "wrong", f"expected {brief(own)}   got {brief(found)}")],
                rule="every layer needs its full weights in backward; then each shard "
                "gets its chunk of the mean gradient",
            )


# ── 3.22 C2 ─────────────────────────────────────────────────────────────────────────


@clause(BACKWARD, "C2", worlds=SEVERAL, runs=_with_prefetch)
def never_more_than_that(runs: Runs) -> str | None:
    """Whole weights at their most; and all that is alive after backward()."""
    n = runs.world_size
    sizes = [8 * n * size for size in layers.layer_elements(n)]
    for values in _ways(n):
        count = 1 + len(values)
        run = finished_run(runs, layers.train_stage3, **values)
        most = max(sum(sizes[i : i + count]) for i in range(len(sizes)))
        how = "two layers" if values else "one layer"
        peak = max(value["peak"] for value in run.values)
        if peak > most:
            raise NotYetError(
                f"{peak} bytes of weights are unsharded at the same time, expected at "
                f"most the {most} of {how}",
                slug="layers-not-freed",
                evidence=_evidence(run, "peak", most),
                rule="free a layer's weights after its forward and after its backward",
            )
        _expect_only_shards(run, n)
        expect_freed(run)
        expect_no_copy(run, "unshard", "prefetch")
    return f"n = {n}: at most {peak} bytes unsharded, the full model has {sum(sizes)}"


def _expect_only_shards(run: Run, n: int) -> None:
    shard = layers.shard_bytes(n)
    for value in run.values:
        for step, told in enumerate(value["steps"]):
            if told["held"] > shard * (2 + (step > 0)) + ROOM:
                raise NotYetError(
                    f"after backward(), a rank holds {told['held']} bytes, expected "
                    f"{shard * (2 + (step > 0))}, those of its shards, their gradients "
                    "and state",
                    slug="full-gradients-kept",
                    rule="after a layer's backward, free its full weights and its "
                    "full gradients",
                )


# ── 3.22 C3 ─────────────────────────────────────────────────────────────────────────


@clause(BACKWARD, "C3", worlds=SEVERAL, runs=_with_prefetch)
def three_times(runs: Runs) -> str | None:
    """What a step sends: each layer twice, and its gradients once."""
    n = runs.world_size
    right = 3 * 8.0 * (n - 1) * sum(layers.layer_elements(n))
    for values in _ways(n):
        run = finished_run(runs, layers.train_stage3, **values)
        sent = [value["steps"][-1]["sent"] for value in run.values]
        what = "a step" + " with prefetch" * bool(values)
        _expect_sent(run, sent, right, what)
        if not values:
            expect_bytes(run, [value["half"]["sent"] for value in run.values], what, 3)
    return f"n = {n}: {right:.0f} bytes per rank and step, 1.5 × those of DDP"
