"""Stages on ranks: the course transformer, in the simulator and on gloo."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import combinations, pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distlab.curriculum.units import load
from distlab.models.transformer import (
    TransformerConfig,
    make_transformer,
    next_token_loss,
)
from distlab.runner import Cluster, RankContext
from distlab.sim import run

CONFIG = TransformerConfig(vocab_size=9, context=5, dim=8, num_heads=2, num_layers=3)
SIZES = (4, 3)  # sequences in the batch of each step


@pytest.fixture(scope="module")
def unit() -> ModuleType:
    return load("model_parallel", "reference")


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(size, CONFIG.context) for size in SIZES]
    return [torch.randint(0, 9, shape, generator=generator) for shape in shapes]


def trained(context: RankContext) -> tuple[list[Tensor], list[float]]:
    """Some steps of a transformer that no rank has whole: tokens go in as integers."""
    unit = load("model_parallel", "reference")
    layers = list(make_transformer(CONFIG))
    costs = [float(sum(p.numel() for p in layer.parameters())) for layer in layers]
    stages = unit.partition(costs, context.world_size)
    stage = nn.Sequential(*(layers[i] for i in stages[context.rank]))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.5)
    example = torch.empty(CONFIG.context, CONFIG.dim, dtype=torch.float64)
    losses = [
        unit.train_step(
            context.comm, stage, optimizer, next_token_loss, tokens, tokens, example
        )
        for tokens in batches()
    ]
    return [p.detach() for p in stage.parameters()], losses


def one_process() -> tuple[list[Tensor], list[float]]:
    model = make_transformer(CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for tokens in batches():
        optimizer.zero_grad()
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return [p.detach() for p in model.parameters()], losses


@pytest.mark.parametrize("transport", ["sim", "gloo"])
def test_a_transformer_in_stages_trains_as_in_one_process(
    cluster: Cluster, transport: str
) -> None:
    n = 3
    done: Any = run(trained, n) if transport == "sim" else cluster.run(trained, n)
    done.require_finished()
    weights, losses = one_process()
    found = [weight for stage, _ in done.values for weight in stage]
    torch.testing.assert_close(found, weights, rtol=0, atol=1e-10)
    assert [told for _, told in done.values] == [pytest.approx(losses)] * n


def test_no_cut_is_better_than_the_one_of_partition(unit: ModuleType) -> None:
    draw = random.Random(2)
    for _ in range(60):
        costs = [draw.choice((0.0, 0.5, 1.0, 3.0, 8.0)) for _ in range(7)]
        num_stages = draw.randint(1, 7)
        cuts = combinations(range(1, 7), num_stages - 1)
        best = min(
            max(sum(costs[a:b]) for a, b in pairwise((0, *inner, 7))) for inner in cuts
        )
        stages = unit.partition(costs, num_stages)
        assert [layer for stage in stages for layer in stage] == list(range(7))
        assert max(sum(costs[i] for i in stage) for stage in stages) == best


def test_partition_is_fast_for_long_models(unit: ModuleType) -> None:
    stages = unit.partition([1.0] * 128, 16)  # 10^19 cuts: they cannot all be tried
    assert [len(stage) for stage in stages] == [8] * 16


@pytest.mark.parametrize(("layers", "stages"), [(2, 3), (2, 0), (0, 1)])
def test_too_few_layers_are_refused(unit: ModuleType, layers: int, stages: int) -> None:
    with pytest.raises(ValueError, match=rf"^{layers} layers\b.*\b{stages}\b"):
        unit.partition([1.0] * layers, stages)


def test_the_judge_knows_the_mistakes_at_every_size_without_torchs_compiler() -> None:
    """To import the compiler takes seconds, in a process that needs it for nothing."""
    program = (
        "import sys\n"
        "from distlab.grading.checks.model_parallel.step import WORLDS, _suspects\n"
        "counts = [len(_suspects(7, n)) for n in WORLDS]\n"
        "print(counts, 'torch._dynamo' in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert told.stdout == "[5, 5, 4, 4, 2] False\n"
