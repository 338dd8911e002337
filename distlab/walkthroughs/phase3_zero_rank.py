"""Count bytes on each rank for the ZeRO sections of phase 3's lab.

We count the bytes that a rank sends in a step, and the bytes of gradients that it
holds. See also `phase3_rank`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.runner import RankContext

WIDTH, NUM_LAYERS = 64, 4  # square layers of 16,384 bytes
NUM_BYTES = NUM_LAYERS * WIDTH * WIDTH * 4


def sent_by_ddp(
    context: RankContext, unit: ModuleType, *, seed: int = 0, num_backwards: int
) -> tuple[float, float]:
    """Count the bytes that this rank sends in a step of plain data parallelism.

    The first number is for backward(), and the second is for the rest of the step.
    """
    model = _layers(seed, NUM_LAYERS)
    ddp = unit.DistributedDataParallel(model, context.comm)
    optimizer = torch.optim.AdamW(model.parameters())
    before = context.traffic.sent_bytes
    with ddp.no_sync():
        for _ in range(num_backwards - 1):
            _backward(ddp)
    _backward(ddp)
    reduced = context.traffic.sent_bytes
    optimizer.step()
    return reduced - before, context.traffic.sent_bytes - reduced


def sent_by_stage(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    stage: int,
    num_backwards: int,
) -> tuple[float, float]:
    """Count the same bytes with a ZeRO stage."""
    model = _layers(seed, NUM_LAYERS)
    sharded = _sharded(context, unit, stage, model)
    before = context.traffic.sent_bytes
    for _ in range(num_backwards):
        _backward(model)
    reduced = context.traffic.sent_bytes
    sharded.reduce_gradients()
    sharded.step()
    return reduced - before, context.traffic.sent_bytes - reduced


def gradient_bytes(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    stage: int,
    num_layers: int,
) -> list[int]:
    """Count the bytes of gradients that this rank holds at every moment of a step.

    From the last layer to the first, the moments are when its gradient is ready and
    when the stage's hooks have returned. The final one is when reduce_gradients has
    returned.
    """
    model, held = _layers(seed, num_layers), list[int]()
    buckets: list[Any] = []

    def look(_: Tensor) -> None:
        gradients = [p.grad for p in model.parameters()]
        held.append(_nbytes([*gradients, *(b.shard.grad for b in buckets)]))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    sharded = _sharded(context, unit, stage, model)
    buckets += sharded.buckets
    for parameter in model.parameters():  # hooks run in the order of registration
        parameter.register_post_accumulate_grad_hook(look)
    _backward(model)
    sharded.reduce_gradients()
    look(torch.empty(0))
    return held


def _layers(seed: int, num_layers: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))
    return nn.Sequential(*layers)


def _sharded(context: RankContext, unit: ModuleType, stage: int, model: Any) -> Any:
    group = {"params": list(model.parameters()), "lr": 1e-3}
    zero = unit.ShardedOptimizer(context.comm, model, [group], torch.optim.AdamW)
    return unit.at_stage(stage, zero)


def _backward(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).square().mean().backward()


def _nbytes(tensors: Any) -> int:
    """Count the bytes of memory behind these tensors, each of them once."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in tensors
        if t is not None
    }
    return sum(storages.values())
