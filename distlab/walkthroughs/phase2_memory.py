"""Count bytes for phase 2's walkthrough: activations kept, and messages sent.

Scenarios have the autograder's form, `(context, unit, **values) -> plain data`, where
`unit` is the learner's module.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.models.transformer import Block, TransformerConfig, next_token_loss
from distlab.runner import RankContext
from distlab.saved_tensors import SavedTensors
from distlab.training.mesh_rank import MeshConfig


def memory_of_a_step(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    batch_size: int,
    optimizer: str,
) -> dict[str, int]:
    """Count the bytes of one step of the course's transformer in float32, by purpose.

    `optimizer` is the name of a class in torch.optim.
    """
    config = MeshConfig(batch_size=batch_size)
    model, batch = config.make_model().float(), config.batch(0)
    stepper = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-3)
    with SavedTensors(model.parameters()) as live:
        next_token_loss(model(batch), batch).backward()
    stepper.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    state = [
        value
        for entry in stepper.state.values()
        for value in entry.values()
        if isinstance(value, Tensor)
    ]
    return {
        "parameters": _bytes(model.parameters()),
        "gradients": _bytes(gradients),
        "optimizer state": _bytes(state),
        "activations": live.peak,
    }


def accumulate(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    num_sequences: int,
    counts: tuple[int, ...],
) -> list[dict[str, int]]:
    """Count this rank's bytes sent and kept in one step of K microbatches, for each K.

    `each` counts a step that sends the gradients of every microbatch, and `once` a step
    with sync_once.
    """
    config = MeshConfig(num_layers=2, batch_size=num_sequences)
    comm, traffic = context.comm, context.traffic
    mine = config.batch(0).chunk(comm.world_size)[comm.rank]
    rows = []
    for count in counts:
        microbatches = [(x, x) for x in mine.chunk(count)]
        model = config.make_model()
        start = traffic.sent_bytes
        _sync_each(comm, model, microbatches)
        between = traffic.sent_bytes
        model = config.make_model()
        with SavedTensors(model.parameters()) as live:
            unit.sync_once(comm, model, next_token_loss, microbatches)
        once = traffic.sent_bytes - between
        sent = {"each": int(between - start), "once": int(once)}
        rows.append({"K": count, **sent, "kept": live.peak})
    return rows


def _sync_each(
    comm: Comm, model: nn.Module, microbatches: list[tuple[Tensor, Tensor]]
) -> None:
    for inputs, targets in microbatches:
        loss = next_token_loss(model(inputs), targets)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for gradient in gradients:
            comm.all_reduce(gradient)


def checkpoint_groups(
    context: RankContext, unit: ModuleType, *, seed: int = 0, num_layers: int
) -> list[dict[str, Any]]:
    """Return the peak with checkpointed groups of g layers, for each divisor g.

    A layer keeps one activation, its output, which is also the unit of the peak. The
    first entry, with g = 0, is a step without checkpointing.
    """
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(num_layers)]
    parameters = [p for layer in layers for p in layer.parameters()]
    num_forwards = 0

    def count(*_: object) -> None:
        nonlocal num_forwards
        num_forwards += 1

    for layer in layers:
        layer.register_forward_hook(count)
    rows = []
    for size in (0, *(g for g in range(1, num_layers + 1) if num_layers % g == 0)):
        num_forwards = 0
        inputs = x = torch.randn(16, 64)
        with SavedTensors(parameters) as live:
            for start in range(0, num_layers, size or num_layers):
                group = nn.Sequential(*layers[start : start + (size or num_layers)])
                x = unit.checkpoint(group, x) if size else group(x)
            x.mean().backward()
        peak = live.peak / _bytes([inputs])
        rows.append({"g": size, "peak": peak, "forwards": num_forwards})
    return rows


def pipeline_memory(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    num_microbatches: int,
    microbatch_size: int,
) -> dict[str, int]:
    """Return the peak of this rank's activations in one batch, by schedule.

    Each stage is one block, and all blocks have the same size.
    """
    comm, config = context.comm, TransformerConfig(context=32, dim=64)
    torch.manual_seed(seed)
    block = Block(config).double()
    shape = num_microbatches, microbatch_size, config.context, config.dim
    batch = torch.randn(shape, dtype=torch.float64)
    microbatches = [(x, x) for x in (view.clone() for view in batch)]
    peaks = {}
    for name in ("gpipe", "one_f_one_b"):
        schedule = getattr(unit, name)(comm.rank, comm.world_size, num_microbatches)
        chunks = [unit.ModelChunk(block, microbatches[0][0][0])]
        with SavedTensors(block.parameters()) as live:
            unit.execute(comm, chunks, schedule, _mean, microbatches)
        peaks[name] = live.peak
    return peaks


def _mean(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss that keeps no activation."""
    return output.mean()


def sequence_lengths(
    context: RankContext, unit: ModuleType, *, seed: int = 0, lengths: tuple[int, ...]
) -> list[dict[str, dict[str, int]]]:
    """Count bytes sent and kept for one block forward and backward, by sharding."""
    config = TransformerConfig(dim=64)
    rows = []
    for length in lengths:
        row = {}
        for way in ("single process", "tensor parallel", "sequence parallel"):
            torch.manual_seed(seed)
            block = Block(config).double()
            x = torch.randn(2, length, config.dim, dtype=torch.float64)
            row[way] = _one_block(context, unit, way, block, x)
        rows.append(row)
    return rows


def _one_block(
    context: RankContext, unit: ModuleType, way: str, block: nn.Module, x: Tensor
) -> dict[str, int]:
    comm, start = context.comm, context.traffic.sent_bytes
    if way == "tensor parallel":
        unit.parallel_attention(comm, block.attention)
        unit.parallel_mlp(comm, block.mlp)
    if way == "sequence parallel":
        unit.parallel_attention(comm, block.attention, unit.SEQUENCE)
        unit.parallel_mlp(comm, block.mlp, unit.SEQUENCE)
        x = x.chunk(comm.world_size, dim=1)[comm.rank].contiguous()
    with SavedTensors(block.parameters()) as live:
        block(x.requires_grad_()).mean().backward()
    if way == "sequence parallel":
        unit.all_reduce_replicated_grads(comm, block)
    return {
        "sent": int(context.traffic.sent_bytes - start),
        "kept": live.peak,
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
