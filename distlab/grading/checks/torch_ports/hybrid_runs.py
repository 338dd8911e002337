"""What the ranks do in task 3.27, and what a single process makes of it.

A first model trains in float64 and must equal a single process. A second one computes
in bfloat16, and its messages are read. In another run 2 of 4 ranks load what all saved.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn

from distlab.comm import leave_default_group
from distlab.grading.kit.again import played_once
from distlab.grading.kit.shard_training import (
    BaselineMomentum,
    Momentum,
    batch_of,
    full_weights,
    local,
    make_model,
    one_step,
)
from distlab.grading.kit.torch_group import join
from distlab.grading.kit.torch_wire import Wire
from distlab.runner import RankContext

WORLDS = (4, 3)
STEPS = 2
OTHER_LR = 0.02  # of the new optimizer, until it has loaded the saved one's
EXACT = torch.float64, torch.float64  # to compute, to sum over the ranks
MIXED = torch.bfloat16, torch.float32


def replicas_of(n: int, name: str = "mixed") -> int:
    """4 ranks store two replicas, others one; in float64 each of them stores one."""
    if n == 4:
        return 2
    return n if name == "exact" else 1


def fewer_of(n: int) -> int:
    """How many ranks continue."""
    return min(2, max(1, n - 1))


def shard_size(layer: nn.Module, size: int) -> int:
    """The most elements of a layer that one of `size` ranks stores, by rows."""
    return sum(-(-len(p) // size) * p[0].numel() for p in layer.parameters())


def sharded_steps(
    context: RankContext, unit: ModuleType, seed: int
) -> dict[str, dict[str, Any]]:
    """Some steps, once in float64 and once in fewer bits: by "exact" and "mixed"."""
    join(context)
    found = {}
    for name, dtypes in (("exact", EXACT), ("mixed", MIXED)):
        model = make_model(seed)
        unit.hybrid_shard(model, replicas_of(context.world_size, name), *dtypes)
        found[name] = _trained(model, context.rank, seed)
    leave_default_group()
    return found


def _trained(model: nn.Sequential, rank: int, seed: int) -> dict[str, Any]:
    """The weights at the end; what is stored, and what the first step sends."""
    found: dict[str, Any] = {
        "held": sum(local(p).numel() for p in model.parameters()),
        "stored": sorted({str(p.dtype) for p in model.parameters()}),
    }
    optimizer, wire, computed = Momentum(model), Wire(), []
    model[-1].register_forward_hook(lambda *_: computed.append(str(_[2].dtype)))
    with wire:
        one_step(model, optimizer, batch_of(seed, 0, rank))
    for step in range(1, STEPS):
        one_step(model, optimizer, batch_of(seed, step, rank))
    found |= {"weights": full_weights(model), "sent": wire.records}
    return found | {"computed": computed[0]}


@played_once
def continued(context: RankContext, unit: ModuleType, seed: int) -> Tensor | None:
    """All ranks train and save; the first ones load into a new model and go on."""
    join(context)
    n, rank = context.world_size, context.rank
    fewer = fewer_of(n)
    folder = str(Path.cwd().parent / "checkpoint")
    model = make_model(seed)
    unit.hybrid_shard(model, replicas_of(n), torch.float64, torch.float64)
    optimizer = Momentum(model)
    for step in range(STEPS):
        one_step(model, optimizer, batch_of(seed, step, rank))
    unit.save(model, optimizer, folder)
    store = c10d._get_default_store()
    dist.barrier()
    leave_default_group()
    if rank >= fewer:
        return None
    os.environ["WORLD_SIZE"] = str(fewer)
    again = c10d.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=fewer)
    model = make_model(seed + 1)
    unit.hybrid_shard(model, 1, torch.float64, torch.float64)
    optimizer = Momentum(model, lr=OTHER_LR)
    unit.load(model, optimizer, folder)
    one_step(model, optimizer, batch_of(seed, STEPS, rank))
    weights = full_weights(model)
    leave_default_group()
    return weights


def node_of(rank: int, n: int, name: str = "mixed") -> tuple[int, ...]:
    """The ranks that store one replica together with `rank`."""
    size = n // replicas_of(n, name)
    return tuple(range(rank - rank % size, rank - rank % size + size))


# ── what is right ───────────────────────────────────────────────────────────────────


@lru_cache(maxsize=32)
def one_process(seed: int, ranks: tuple[int, ...], steps: int = STEPS) -> Tensor:
    """The weights after steps with the batches of these ranks."""
    model = make_model(seed)
    _baseline_steps(model, BaselineMomentum(model), seed, ranks, range(steps))
    return full_weights(model)


def _baseline_steps(
    model: nn.Module,
    optimizer: BaselineMomentum,
    seed: int,
    ranks: Sequence[int],
    steps: range,
) -> None:
    for step in steps:
        batches = [batch_of(seed, step, rank) for rank in ranks]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        one_step(model, optimizer, (inputs, targets))


@lru_cache(maxsize=16)
def continued_baseline(seed: int, n: int, lost: str = "") -> Tensor:
    """The weights after one more step; `lost` is what was not loaded."""
    model = make_model(seed)
    optimizer = BaselineMomentum(model)
    _baseline_steps(model, optimizer, seed, range(n), range(STEPS))
    if lost == "all":
        model = make_model(seed + 1)
    if lost in ("all", "optimizer"):
        optimizer = BaselineMomentum(model, lr=OTHER_LR)
    if lost == "settings":
        optimizer.param_groups[0]["lr"] = OTHER_LR
    _baseline_steps(model, optimizer, seed, range(fewer_of(n)), range(STEPS, STEPS + 1))
    return full_weights(model)
