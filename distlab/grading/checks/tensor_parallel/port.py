"""Checks of task 2.25, `tensor_parallel.port`: a block on a mesh, by DTensors."""

from __future__ import annotations

import copy
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import leave_default_group
from distlab.grading.checks.tensor_parallel.shared import (
    as_tensor,
    attempt,
    expect_nothing_done,
    expect_refusal,
)
from distlab.grading.checks.tensor_parallel.whole import (
    LEARNING_RATE,
    STEPS,
    expect_frozen,
    freeze,
    inputs_of,
    learning_of,
    make_block,
    upstream_of,
)
from distlab.grading.clause import clause
from distlab.grading.kit.torch_group import finished, join
from distlab.grading.kit.values import all_close, expect_values, same_everywhere
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.models.transformer import Block, TransformerConfig
from distlab.runner import RankContext

WORLDS = (3, 2, 4, 1)  # DTensors take their time, in each rank anew
DIVIDED = (3, 2, 4)
CUT = ("attention.qkv", "attention.proj", "mlp.up", "mlp.down")


def ported_block(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """A block after with_torch, trained for some steps; then heads that do not fit."""
    from torch.distributed.device_mesh import init_device_mesh

    join(context)
    n = shards_of(context.world_size)
    shape = context.world_size // n, n
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))["tensor"]
    block = freeze(make_block(seed, n), n)
    unit.with_torch(mesh, block)
    found = _trained(block, seed, n)
    found["learning"] = learning_of(block)
    found["held"] = {name: _held(block.get_submodule(name)) for name in CUT}
    found["refused"] = _refused(unit, mesh, n)
    leave_default_group()
    return found


def shards_of(world_size: int) -> int:
    """Of 4 ranks, 2 hold a block together; fewer do so all."""
    return 2 if world_size == 4 else world_size


def _trained(block: nn.Module, seed: int, n: int) -> dict[str, Any]:
    outs, backs = [], []
    for step in range(STEPS):
        x = inputs_of(seed, n, step).requires_grad_()
        upstream = upstream_of(seed, n, step)
        y = block(x)
        if isinstance(y, Tensor) and y.requires_grad and y.shape == upstream.shape:
            y.backward(upstream)
        outs.append(as_tensor(y))
        backs.append(as_tensor(x.grad))
        with torch.no_grad():
            for parameter in block.parameters():
                if parameter.grad is not None:
                    parameter.sub_(LEARNING_RATE * parameter.grad)
                    parameter.grad = None
    return {"outs": outs, "backs": backs}


def _held(layer: nn.Module) -> int:
    """How many numbers of a layer's weight this rank has."""
    weight: Any = layer.weight
    return int(getattr(weight, "to_local", lambda: weight)().numel())


def _refused(unit: ModuleType, mesh: Any, n: int) -> dict[str, Any]:
    """One head too many, of n channels each: all can be cut in n, but not the heads."""
    odd = Block(TransformerConfig(dim=n * (n + 1), num_heads=n + 1)).double()
    before = copy.deepcopy(odd.state_dict())
    raised = attempt(lambda: unit.with_torch(mesh, odd))
    same = all(
        type(tensor) is Tensor and torch.equal(tensor, before[name])
        for name, tensor in odd.state_dict().items()
    )
    return {"raised": raised, "replaced": not same}


# ── C1 values ───────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=16)
def one_process(seed: int, n: int) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of the inputs, step by step."""
    found = _trained(freeze(make_block(seed, n), n), seed, n)
    return found["outs"], found["backs"]


@clause("tensor_parallel.port", "C1", worlds=WORLDS, runs=[on_ranks(ported_block)])
def as_in_one_process(runs: Runs) -> str | None:
    """Outputs and input gradients at each step, so the weights' gradients too."""
    run = finished(runs, ported_block)
    world_size, seed = runs.world_size, runs.seed
    n = shards_of(world_size)
    expect_frozen(run, n)
    part = f"on a mesh with only {n} of the {world_size} ranks, " * (n < world_size)
    for step in range(STEPS):
        for key, right in zip(("outs", "backs"), one_process(seed, n), strict=True):
            values = [value[key][step] for value in run.values]
            if all_close(values, same_everywhere(right[step], world_size)):
                continue
            what = "the block's output" if key == "outs" else "the input gradient"
            expect_values(
                values,
                same_everywhere(right[step], world_size),
                what=f"{part}{what} at step {step + 1}",
            )
    return f"n = {world_size}: {STEPS} training steps equal the single-process baseline"


# ── C2 memory ───────────────────────────────────────────────────────────────────────


@clause("tensor_parallel.port", "C2", worlds=DIVIDED, runs=[on_ranks(ported_block)])
def a_share_of_the_weights(runs: Runs) -> str | None:
    """How many numbers of each of the four weights are on each rank."""
    run, n = finished(runs, ported_block), shards_of(runs.world_size)
    block = make_block(runs.seed, n)
    for name in CUT:
        size = _held(block.get_submodule(name))
        found = [value["held"][name] for value in run.values]
        if max(found) > size // n:
            raise NotYetError(
                f"rank {found.index(max(found))} holds {max(found)} elements of "
                f"{name}.weight, expected {size // n}, which is 1/{n} of all",
                slug="weights-not-cut",
                evidence=[
                    (rank, "holds", f"{count} of {size}")
                    for rank, count in enumerate(found)
                ],
                rule=f"a style for each of {', '.join(CUT)}",
            )
    return f"n = {runs.world_size}: each rank stores 1/{n} of the four weights"


# ── C3 what does not fit ────────────────────────────────────────────────────────────


@clause("tensor_parallel.port", "C3", worlds=DIVIDED, runs=[on_ranks(ported_block)])
def whole_heads_only(runs: Runs) -> str | None:
    """A block of n + 1 heads is refused, before anything was replaced."""
    run, n = finished(runs, ported_block), shards_of(runs.world_size)
    tried = [value["refused"] for value in run.values]
    what = f"with_torch with {n + 1} heads on {n} ranks"
    rule = "torch does not check: it splits unevenly if it must"
    raised = [one["raised"] for one in tried]
    expect_refusal(run, raised, what, rule)
    happened = f"refused {n + 1} heads on {n} ranks only after it had replaced a layer"
    done = [one["replaced"] for one in tried]
    expect_nothing_done(happened, done, raised, "a block")
    return None
