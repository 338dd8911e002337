"""What each rank does in the walkthrough of phase 2; `unit` is the learner's module.

Scenarios as the autograder's: `(context, unit, **values) -> plain data`. Those about
bytes are in `phase2_memory.py`, the 2 × 2 ranks in `phase2_mesh_rank.py`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.experiments.phase2_mesh_rank import num_weights
from distlab.grading.checks.pipeline_race import Timed
from distlab.models.transformer import Block, TransformerConfig
from distlab.runner import RankContext

_RATE = 1e-3
_BLOCK = TransformerConfig()


def tiny_updates(
    context: RankContext, unit: ModuleType, *, seed: int = 0, num_steps: int
) -> dict[str, list[float]]:
    """A weight that begins at 1 and is to grow by 1e-3 in each step, in three ways."""
    return {
        "float32": _walk(torch.float32, num_steps),
        "bfloat16": _walk(torch.bfloat16, num_steps),
        "bfloat16 and a master": _walk_with_master(context.comm, unit, num_steps),
    }


def _weight(dtype: torch.dtype) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.ones_(model.weight)
    return model


def _walk(dtype: torch.dtype, num_steps: int) -> list[float]:
    weight, places = _weight(dtype).weight, [1.0]
    optimizer = torch.optim.SGD([weight], lr=_RATE)
    for _ in range(num_steps):
        weight.grad = -torch.ones_like(weight)
        optimizer.step()
        places.append(float(weight))
    return places


def _walk_with_master(comm: Comm, unit: ModuleType, num_steps: int) -> list[float]:
    model, places = _weight(torch.bfloat16), [1.0]
    master = unit.master_copy(model)
    optimizer = torch.optim.SGD(master, lr=_RATE)
    for _ in range(num_steps):
        model.weight.grad = -torch.ones_like(model.weight)
        unit.gradients_to_master(comm, model, master)
        optimizer.step()
        unit.master_to_model(master, model)
        places.append(float(model.weight))
    return places


def loss_scale(
    context: RankContext, unit: ModuleType, *, seed: int = 0, num_steps: int
) -> list[dict[str, Any]]:
    """The scale in each step, and whether this rank's gradient was still a number.

    The gradient is 1 on rank 0 and 3 on rank 1, and float16 ends at 65,504.
    """
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    scaler = unit.LossScaler(context.comm, init_scale=2.0**12, growth_interval=4)
    told = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = (weight.float() * (1 + 2 * context.rank)).sum()
        scaler.scale(loss).backward()
        assert weight.grad is not None
        fits = bool(weight.grad.isfinite())
        scale = float(scaler.state_dict()["loss_scale"])
        stepped = bool(scaler.step(optimizer))
        scaler.update()
        told.append({"scale": scale, "fits": fits, "stepped": stepped})
    return told


def cut_layers(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    costs: tuple[float, ...],
    num_stages: int,
) -> list[list[int]]:
    """The learner's stages."""
    return [list(stage) for stage in unit.partition(list(costs), num_stages)]


def drawn_schedules(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    name: str,
    num_ranks: int,
    num_microbatches: int,
) -> str:
    """The table of the learner's lists; a backward takes two units of time."""
    make = getattr(unit, name)
    return str(
        unit.draw(
            [make(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
        )
    )


def pipeline_times(
    context: RankContext, unit: ModuleType, *, seed: int = 0, counts: tuple[int, ...]
) -> list[float]:
    """Virtual seconds of a batch in m microbatches, by 1F1B; for each m."""
    comm, x = context.comm, torch.ones(1, 1, dtype=torch.float64)
    times = []
    for m in counts:
        chunk = unit.ModelChunk(Timed(context.clock.sleep), x[0])
        schedule = unit.one_f_one_b(comm.rank, comm.world_size, m)
        comm.barrier()
        started = comm.time()
        unit.execute(
            comm,
            [chunk],
            schedule,
            lambda output, target: (output - target).square().mean(),
            [(x, x)] * m,
        )
        times.append(comm.time() - started)
    return times


def passages(
    context: RankContext, unit: ModuleType, *, seed: int = 0
) -> dict[str, list[float]]:
    """Two linear layers, cut; the errors of what comes out, of x.grad, of the weights'.

    Each is relative to the largest number of one process. `straight` does nothing.
    """
    comm = context.comm
    torch.manual_seed(seed)
    up, down = nn.Linear(8, 16).double(), nn.Linear(16, 8).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    whole = _there_and_back(up, down, x)
    expected = [whole[0], whole[1], whole[2].chunk(comm.world_size)[comm.rank]]
    f, g = unit.copy_to_region, unit.reduce_from_region
    ways = {"f and g": (f, g), "without f": (straight, g), "without g": (f, straight)}
    found = {}
    for label, (enter, leave) in ways.items():
        column = unit.ColumnParallelLinear(comm, up, enter)
        row = unit.RowParallelLinear(comm, down, leave)
        got = _there_and_back(column, row, x)
        found[label] = [
            float((a - b).abs().max() / b.abs().max())
            for a, b in zip(got, expected, strict=True)
        ]
    return found


def straight(comm: Comm, x: Tensor) -> Tensor:
    """A way in or out that forgets the other ranks."""
    return x


def _there_and_back(up: Any, down: Any, x: Tensor) -> list[Tensor]:
    """The output, the gradient of x, and that of the first weight."""
    x = x.clone().requires_grad_()
    output = down(nn.functional.gelu(up(x)))
    output.square().mean().backward()
    assert x.grad is not None
    return [output.detach(), x.grad, up.weight.grad]


def one_block(
    context: RankContext, unit: ModuleType, *, seed: int = 0
) -> list[dict[str, Any]]:
    """A transformer's block, cut, once there and once back: layer after layer.

    Of each its weights, here and in all, and how many messages it sent.
    """
    torch.manual_seed(seed)
    block = Block(_BLOCK).double()
    whole = {name: num_weights(layer) for name, layer in _layers(block).items()}
    unit.parallel_attention(context.comm, block.attention)
    unit.parallel_mlp(context.comm, block.mlp)
    told: list[dict[str, Any]] = []
    sent = 0

    def tell(way: str, name: str, layer: nn.Module) -> None:
        nonlocal sent
        new, sent = context.traffic.messages - sent, context.traffic.messages
        weights = {"weights": num_weights(layer), "whole": whole[name]}
        told.append({"way": way, "layer": name, **weights, "sent": new})

    for name, layer in _layers(block).items():
        layer.register_forward_hook(lambda m, *_, name=name: tell("forward", name, m))
        layer.register_full_backward_hook(
            lambda m, *_, name=name: tell("backward", name, m)
        )
    x = torch.randn(2, 8, _BLOCK.dim, dtype=torch.float64, requires_grad=True)
    block(x).square().mean().backward()
    return told


def _layers(block: Block) -> dict[str, nn.Module]:
    names = ("norm1", "attention.qkv", "attention.proj", "norm2", "mlp.up", "mlp.down")
    return {name.split(".")[-1]: block.get_submodule(name) for name in names}
