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
from distlab.grading.kit.torch_group import join
from distlab.grading.kit.torch_wire import Wire
from distlab.runner import RankContext

WORLDS = (4, 3)
STEPS, SAMPLES = 2, 3
WIDTHS = (6, 5, 7, 3)
OTHER_LR = 0.02  # of the new optimizer, until it has loaded the saved one's
EXACT = torch.float64, torch.float64  # to compute, to sum over the ranks
MIXED = torch.bfloat16, torch.float32


def replicas_of(n: int) -> int:
    """4 ranks store two replicas, others one."""
    return 2 if n == 4 else 1


def fewer_of(n: int) -> int:
    """How many ranks continue."""
    return min(2, max(1, n - 1))


def shard_size(layer: nn.Module, size: int) -> int:
    """The most elements of a layer that one of `size` ranks stores, by rows."""
    return sum(-(-len(p) // size) * p[0].numel() for p in layer.parameters())


def make_model(seed: int) -> nn.Sequential:
    """Three layers in float64, (N, 6) to (N, 3)."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(WIDTHS[0], WIDTHS[1]), nn.Tanh()),
        nn.Sequential(nn.Linear(WIDTHS[1], WIDTHS[2]), nn.Tanh()),
        nn.Linear(WIDTHS[2], WIDTHS[3]),
    ).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            shape = parameter.shape
            parameter.copy_(torch.randn(shape, generator=generator).double() * 0.5)
    return model


def batch_of(seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs (samples, 6) and targets (samples, 3)."""
    generator = torch.Generator().manual_seed(seed * 7919 + step * 101 + rank)
    drawn = torch.randn(SAMPLES, WIDTHS[0] + WIDTHS[-1], generator=generator)
    inputs, targets = drawn.double().split([WIDTHS[0], WIDTHS[-1]], 1)
    return inputs, targets


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whatever the dtype of the outputs is."""
    return (outputs.double() - targets).square().mean()


class Momentum(torch.optim.Optimizer):
    """SGD with momentum, shard by shard: torch's own takes long with its first DTensor.

    Its state counts from the second step on.
    """

    def __init__(self, model: nn.Module, lr: float = 0.1) -> None:
        super().__init__(model.parameters(), {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """See `torch.optim.Optimizer.step`."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum = local(state["momentum"])
                momentum.mul_(0.9).add_(local(parameter.grad))
                local(parameter).sub_(group["lr"] * momentum)


def local(tensor: Any) -> Tensor:
    """What this rank has of it."""
    mine: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return mine.detach()


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> None:
    """Forward, backward, step."""
    optimizer.zero_grad()
    loss_of(model(batch[0]), batch[1]).backward()
    optimizer.step()


def full_weights(model: nn.Module) -> Tensor:
    """All in one flat tensor; every rank takes part."""
    found = [getattr(p, "full_tensor", p.detach)() for p in model.parameters()]
    return torch.cat([weight.detach().flatten() for weight in found]).clone()


def sharded_steps(
    context: RankContext, unit: ModuleType, seed: int
) -> dict[str, dict[str, Any]]:
    """Some steps, once in float64 and once in fewer bits: by "exact" and "mixed"."""
    join(context)
    found = {}
    for name, dtypes in (("exact", EXACT), ("mixed", MIXED)):
        model = make_model(seed)
        unit.hybrid_shard(model, replicas_of(context.world_size), *dtypes)
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


def node_of(rank: int, n: int) -> tuple[int, ...]:
    """The ranks that store one replica together with `rank`."""
    size = n // replicas_of(n)
    return tuple(range(rank - rank % size, rank - rank % size + size))


# ── what is right ───────────────────────────────────────────────────────────────────


@lru_cache(maxsize=32)
def one_process(seed: int, ranks: tuple[int, ...], steps: int = STEPS) -> Tensor:
    """The weights after steps with the batches of these ranks."""
    model = make_model(seed)
    _baseline_steps(model, Momentum(model), seed, ranks, range(steps))
    return full_weights(model)


def _baseline_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
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
    optimizer = Momentum(model)
    _baseline_steps(model, optimizer, seed, range(n), range(STEPS))
    if lost == "all":
        model = make_model(seed + 1)
    if lost in ("all", "optimizer"):
        optimizer = Momentum(model, lr=OTHER_LR)
    if lost == "settings":
        optimizer.param_groups[0]["lr"] = OTHER_LR
    _baseline_steps(model, optimizer, seed, range(fewer_of(n)), range(STEPS, STEPS + 1))
    return full_weights(model)
