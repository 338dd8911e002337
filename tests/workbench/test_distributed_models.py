"""`distlab.distributed`: models in shards, in stages, and with checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlab.distributed as dist
from distlab.models.transformer import (
    TransformerConfig,
    make_transformer,
    next_token_loss,
)
from distlab.runner import Cluster, RankContext
from distlab.saved_tensors import SavedTensors
from tests.workbench.distributed_ranks import begin, ranks

CONFIG = TransformerConfig(num_layers=3)


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(CONFIG.vocab_size, (8, 16), generator=generator)


def losses_alone() -> list[float]:
    model = make_transformer(CONFIG)
    return trained(
        model.parameters(), lambda: next_token_loss(model(tokens()), tokens())
    )


def trained(parameters: Any, loss_of: Callable[[], Tensor | float]) -> list[float]:
    """The losses of three steps; a loss that is a number has been backward already."""
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of()
        if isinstance(loss, Tensor):
            loss.backward()
            loss = float(loss.detach())
        losses.append(loss)
        optimizer.step()
    return losses


def in_tensors(context: RankContext) -> dict[str, Any]:
    rank, _ = begin(context)
    model = dist.TensorParallel(make_transformer(CONFIG, seed=rank))
    shape = tuple(model.module[1].mlp.up.weight.shape)
    losses = trained(
        model.parameters(), lambda: next_token_loss(model(tokens()), tokens())
    )
    refused = ""
    try:
        dist.TensorParallel(nn.Sequential(nn.Linear(2, 3)), plan={"0": "column"})
    except ValueError as error:
        refused = str(error)
    return {"losses": losses, "shape": shape, "refused": refused}


@pytest.mark.parametrize("n", [2, 4])
def test_tensor_parallel_trains_as_one_process(cluster: Cluster, n: int) -> None:
    expected = losses_alone()
    for found in ranks(cluster, in_tensors, n):
        assert found["losses"] == pytest.approx(expected, rel=1e-10)
        assert found["shape"] == (4 * CONFIG.dim // n, CONFIG.dim)
        assert re.match(rf"0: 3 .*\b{n} ranks", found["refused"])


def in_stages(context: RankContext, schedule: str, num_chunks: int) -> list[float]:
    rank, _ = begin(context)
    model = dist.PipelineParallel(
        make_transformer(CONFIG, seed=rank),
        tokens()[0],
        next_token_loss,
        num_microbatches=4,
        schedule=schedule,  # type: ignore[arg-type]
        num_chunks=num_chunks,
    )
    return trained(model.parameters(), lambda: model.train_batch(tokens(), tokens()))


@pytest.mark.parametrize(
    ("n", "schedule", "num_chunks"),
    [
        (3, "1f1b", 1),
        (2, "interleaved", 2),
        pytest.param(2, "gpipe", 1, marks=pytest.mark.slow),
        pytest.param(1, "1f1b", 1, marks=pytest.mark.slow),
    ],
)
def test_pipeline_parallel_trains_as_one_process(
    cluster: Cluster, n: int, schedule: str, num_chunks: int
) -> None:
    expected = losses_alone()
    for losses in ranks(cluster, in_stages, n, schedule, num_chunks):
        assert losses == pytest.approx(expected, rel=1e-10)


def checkpoints(context: RankContext) -> dict[str, Any]:
    rank, _ = begin(context)
    found: dict[str, Any] = {}
    for name in ("plain", "scope"):
        model = dist.DistributedDataParallel(make_transformer(CONFIG, seed=rank))
        with SavedTensors(model.parameters()) as saved:
            if name == "scope":
                with dist.checkpoint_scope() as blocks:
                    loss = next_token_loss(model(tokens()), tokens())
                found["blocks"] = [type(block).__name__ for block in blocks]
            else:
                loss = next_token_loss(model(tokens()), tokens())
            found[f"{name} bytes"] = saved.live
        loss.backward()
        found[name] = [p.grad for p in model.parameters()]
        assert "forward" not in model.module[1].__dict__
        del model, loss
    return found


def test_checkpoint_scope_keeps_less_and_gives_the_same(cluster: Cluster) -> None:
    for found in ranks(cluster, checkpoints, 2):
        assert found["blocks"] == ["Embedding", *["Block"] * 3, "Head"]
        assert found["scope bytes"] * 4 < found["plain bytes"]
        pairs = zip(found["scope"], found["plain"], strict=True)
        assert all(torch.equal(own, plain) for own, plain in pairs)


def test_checkpoint_scope_needs_blocks() -> None:
    with pytest.raises(ValueError, match="name them"), dist.checkpoint_scope():
        pass


# ── checkpoint_scope: what the second run must find again ───────────────────────────


class Counted(nn.Module):
    """Multiplies by the number of its calls, which it puts into a new buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.layer(inputs) * self.count


def stateful_blocks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    return {
        "batch norm": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()),
        "mean of all": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)),
        "spectral norm": nn.Sequential(spectral, nn.Tanh()),
        "dropout": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        "counter": Counted(),
    }


@pytest.mark.parametrize("name", stateful_blocks())
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_checkpoint_scope_finds_autocast_buffers_and_random_numbers_again(
    name: str, dtype: torch.dtype | None
) -> None:
    found = []
    for is_checkpointed in (False, True):
        block, inputs = stateful_blocks()[name], torch.randn(8, 4)
        torch.manual_seed(1)
        for _ in range(2):
            scope = dist.checkpoint_scope(block) if is_checkpointed else nullcontext()
            cast = torch.autocast("cpu", dtype) if dtype else nullcontext()
            with scope, cast:
                loss = block(inputs).square().mean()
            buffers = list(block.buffers())
            loss.backward()  # outside autocast, as torch recommends
            pairs = zip(block.buffers(), buffers, strict=True)
            assert all(now is before for now, before in pairs)
        tensors = [*[p.grad for p in block.parameters()], *block.buffers()]
        found.append([*tensors, torch.rand(1)])
    for plain, ours in zip(*found, strict=True):
        assert torch.equal(plain, ours)
