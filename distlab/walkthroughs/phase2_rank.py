"""Run on each rank for the walkthrough of phase 2; `unit` is the learner's module.

Scenarios have the autograder's form, `(context, unit, **values) -> plain data`. Those
that count bytes are in `phase2_memory.py`, and the 2 × 2 ranks are in
`phase2_mesh_rank.py`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.given.tensor_parallel import Operators
from distlab.grading.checks.pipeline_parallel.race import Timed
from distlab.models.transformer import next_token_loss
from distlab.runner import RankContext
from distlab.training.mesh_rank import MeshConfig


def tiny_updates(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    first_weight: float,
    updates: tuple[float, ...],
    num_steps: int,
) -> list[dict[str, float]]:
    """Return how much of all updates arrives in a weight, for each size of update.

    We update it in bfloat16 alone, and in bfloat16 with the learner's float32 master
    weights.
    """
    rows = []
    for update in updates:
        moved = {
            "alone": _moved_alone(first_weight, update, num_steps),
            "master": _moved_master(
                context.comm, unit, first_weight, update, num_steps
            ),
        }
        rows.append({k: v / (num_steps * update) for k, v in moved.items()})
    return rows


def _model(first_weight: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.constant_(model.weight, first_weight)
    return model


def _moved_alone(first_weight: float, update: float, num_steps: int) -> float:
    weight = _model(first_weight).weight
    start, optimizer = float(weight), torch.optim.SGD([weight], lr=update)
    for _ in range(num_steps):
        weight.grad = -torch.ones_like(weight)
        optimizer.step()
    return float(weight) - start


def _moved_master(
    comm: Comm, unit: ModuleType, first_weight: float, update: float, num_steps: int
) -> float:
    model = _model(first_weight)
    start, master = float(model.weight), unit.master_copy(model)
    optimizer = torch.optim.SGD(master, lr=update)
    for _ in range(num_steps):
        model.weight.grad = -torch.ones_like(model.weight)
        unit.gradients_to_master(comm, model, master)
        optimizer.step()
        unit.master_to_model(master, model)
    return float(model.weight) - start


def loss_scale(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    num_steps: int,
    growth_interval: int,
    overflow_steps: tuple[int, ...],
) -> list[dict[str, Any]]:
    """Return for each step the scale, this rank's gradient, and whether it stepped.

    In `overflow_steps`, the gradient of the last rank is inf.
    """
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    scaler = unit.LossScaler(
        context.comm, init_scale=2.0**6, growth_interval=growth_interval
    )
    is_last, report = context.rank == context.world_size - 1, []
    for number in range(num_steps):
        optimizer.zero_grad()
        scaler.scale(weight.float().sum()).backward()
        assert weight.grad is not None
        if is_last and number in overflow_steps:
            weight.grad.fill_(torch.inf)
        finite = bool(weight.grad.isfinite())
        scale = float(scaler.state_dict()["loss_scale"])
        stepped = bool(scaler.step(optimizer))
        scaler.update()
        report.append({"scale": scale, "finite": finite, "stepped": stepped})
    return report


def cut_layers(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    costs: tuple[float, ...],
    num_stages: int,
) -> list[list[int]]:
    """Return the learner's stages."""
    return [list(stage) for stage in unit.partition(list(costs), num_stages)]


def drawn_schedules(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int,
    ticks: int,
) -> str:
    """Lay out the learner's lists as a table. A backward takes twice `ticks`.

    A forward takes `ticks`. `num_chunks` is the number of model chunks of a rank, for
    interleaved 1F1B.
    """
    make, chunks = getattr(unit, name), (num_chunks,) * (name == "interleaved")
    schedules = [
        make(rank, num_ranks, num_microbatches, *chunks) for rank in range(num_ranks)
    ]
    return str(unit.draw(schedules, ticks, 2 * ticks))


def pipeline_times(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    counts: tuple[int, ...],
    num_chunks: int,
) -> list[dict[str, float]]:
    """Return the virtual seconds of a batch in m microbatches, by m and by schedule."""
    comm, x = context.comm, torch.ones(1, 1, dtype=torch.float64)
    rank, n = comm.rank, comm.world_size

    def batch_s(schedule: Any, m: int, count: int) -> float:
        chunks = [
            unit.ModelChunk(Timed(context.clock.sleep), x[0]) for _ in range(count)
        ]
        comm.barrier()
        started = comm.time()
        unit.execute(comm, chunks, schedule, _squared_error, [(x, x)] * m)
        return comm.time() - started

    return [
        {
            "1F1B": batch_s(unit.one_f_one_b(rank, n, m), m, 1),
            "interleaved": batch_s(
                unit.interleaved(rank, n, m, num_chunks), m, num_chunks
            ),
        }
        for m in counts
    ]


def _squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train_without(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    num_steps: int,
    left_out: str,
) -> dict[str, list[float]]:
    """Return losses for a single process, with f and g, and without one of them.

    `left_out` is "f" or "g". The learner's functions shard every block.
    """
    f, g = unit.copy_to_region, unit.reduce_from_region
    pairs: dict[str, tuple[Any, Any] | None] = {"single process": None}
    pairs["f and g"] = f, g
    pairs[f"without {left_out}"] = (
        identity if left_out == "f" else f,
        identity if left_out == "g" else g,
    )
    return {
        label: _train(context.comm, unit, pair, num_steps)
        for label, pair in pairs.items()
    }


def _train(
    comm: Comm, unit: ModuleType, pair: tuple[Any, Any] | None, num_steps: int
) -> list[float]:
    config = MeshConfig(num_layers=2, batch_size=8)
    model = config.make_model()
    if pair:
        for block in list(model)[1:-1]:
            unit.parallel_attention(comm, block.attention, Operators(*pair))
            unit.parallel_mlp(comm, block.mlp, Operators(*pair))
    optimizer, losses = config.optimizer(model), []
    for number in range(num_steps):
        batch = config.batch(number)
        optimizer.zero_grad()
        loss = next_token_loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def identity(comm: Comm, x: Tensor) -> Tensor:
    """Do nothing, forward and backward, in place of an operator that sends."""
    return x
