"""Run one of four ranks in a 2 × 2 mesh, where each has half of every layer.

    tensor × pipeline   ranks 0 1 have the first layers, 2 3 the others
    data × tensor       ranks 0 1 have half of the samples, 2 3 the other half

In both layouts, neighbors share a layer: its heads and the inside of its MLP. make_mesh
gives each rank the group of these two, and the group of the two ranks with the same
half. A pipeline sends activations along the second group. If each pair has a whole
model, that group averages the gradients.

This isn't part of `phase2_mesh.py`, so that the process that forks the ranks doesn't
have to import more than this.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.curriculum import load_graft
from distlab.curriculum.units import arrived
from distlab.data.text import load_text
from distlab.models.transformer import (
    TransformerConfig,
    make_transformer,
    next_token_loss,
)
from distlab.runner import RankContext

Layout = Literal["tensor × pipeline", "data × tensor"]
Step = Callable[[Tensor], float]
Units = Mapping[str, ModuleType]


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Settings of a training; a batch is `batch_size` passages of `context` letters."""

    num_steps: int = 60
    batch_size: int = 16
    num_microbatches: int = 4  # of the pipeline
    context: int = 32
    dim: int = 64
    num_heads: int = 4
    num_layers: int = 4
    learning_rate: float = 0.3
    seed: int = 0

    def make_model(self) -> nn.Sequential:
        """Create the whole transformer, the same for every caller."""
        config = TransformerConfig(
            vocab_size=len(load_text().letters),
            context=self.context,
            dim=self.dim,
            num_heads=self.num_heads,
            num_layers=self.num_layers,
        )
        return make_transformer(config, seed=self.seed)

    def batch(self, step: int) -> Tensor:
        """Return the (B, T) tokens of this step."""
        shape = self.batch_size, self.context
        return load_text().batch(shape, seed=self.seed, step=step)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Create plain SGD, with which a rounding error stays as small as it was."""
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate)


def train_as_rank(
    context: RankContext,
    settings: dict[str, Any],
    layout: Layout,
    parts: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """Run the whole training on one rank; `parts` are the learner's units."""
    config, traffic = MeshConfig(**settings), context.traffic
    units = {name: _module(part) for name, part in parts.items()}
    whole = config.make_model()
    tensor = units["tensor_parallel"]
    mesh = tensor.make_mesh(context.comm, 2)
    for block in list(whole)[1:-1]:
        tensor.parallel_attention(mesh.tensor, block.attention)
        tensor.parallel_mlp(mesh.tensor, block.mlp)
    if layout == "tensor × pipeline":
        model, step = as_a_stage(mesh.data, whole, config, units)
    else:
        model, step = whole, with_the_others(mesh.data, whole)
    where = {"half": mesh.tensor.rank, "group": mesh.data.rank}
    context.report({"pid": os.getpid(), **where, "weights": num_weights(model)})

    optimizer, losses = config.optimizer(model), []
    started, sent_bytes = time.perf_counter(), traffic.sent_bytes
    for number in range(config.num_steps):
        optimizer.zero_grad()
        losses.append(float(step(config.batch(number))))
        optimizer.step()
        if context.rank == context.world_size - 1:
            context.report({"step": number, "loss": losses[-1]})
    return {
        "losses": losses,
        "step_bytes": (traffic.sent_bytes - sent_bytes) / config.num_steps,
        "step_s": (time.perf_counter() - started) / config.num_steps,
    }


def as_a_stage(
    comm: Comm, model: nn.Sequential, config: MeshConfig, units: Units
) -> tuple[nn.Sequential, Step]:
    """Return this rank's layers, and its step through all stages in microbatches.

    The cost of a layer is its number of weights, since a step multiplies with each of
    them.
    """
    costs = [num_weights(layer) for layer in model]
    stages = units["model_parallel"].partition(costs, comm.world_size)
    stage = nn.Sequential(*(model[layer] for layer in stages[comm.rank]))
    example = torch.empty(config.context, config.dim, dtype=torch.float64)
    pipeline, m = units["pipeline_parallel"], config.num_microbatches
    schedule = pipeline.one_f_one_b(comm.rank, comm.world_size, m)
    chunks = [pipeline.ModelChunk(stage, example)]

    def step(batch: Tensor) -> float:
        microbatches = [(part, part) for part in batch.chunk(m)]
        loss: float = pipeline.execute(
            comm, chunks, schedule, next_token_loss, microbatches
        )
        return loss

    return stage, step


def with_the_others(comm: Comm, model: nn.Module) -> Step:
    """Return the step of a model that has its share of the samples.

    It averages the gradients over the ranks that have the same half of each layer.
    """

    def step(batch: Tensor) -> float:
        mine = batch.chunk(comm.world_size)[comm.rank]
        loss = next_token_loss(model(mine), mine)
        loss.backward()
        mean = loss.detach().clone()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for tensor in (mean, *gradients):
            tensor /= comm.world_size  # first, because a float16 sum may overflow
            comm.all_reduce(tensor)
        return float(mean)

    return step


def num_weights(module: nn.Module) -> int:
    """Return the number of weights that the module learns."""
    return sum(parameter.numel() for parameter in module.parameters())


def _module(part: dict[str, Any]) -> ModuleType:
    source, reference = arrived(part["source"]), arrived(part["reference"])
    return load_graft(source, reference, part["grafts"])
