"""Tensor parallelism beside torch's own, on a mesh, and in virtual time.

The same transformer is trained by one process, by the solution and by torch's
parallelize_module; the losses must be the same to rounding.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from distlab.comm import leave_default_group
from distlab.curriculum.units import load
from distlab.grading.threads import one_thread
from distlab.models.transformer import (
    TransformerConfig,
    make_transformer,
    next_token_loss,
)
from distlab.runner import Cluster, Limits, RankContext, Run
from distlab.sim import run as simulate

CONFIG = TransformerConfig(vocab_size=16, context=8, dim=16, num_heads=4, num_layers=2)
STEPS = 3
TOKENS = (4, CONFIG.context)
FROZEN = ["norm1.weight", "attention.qkv.weight", "mlp.up.bias", "mlp.down.bias"]
BLOCK_LAYERS = {
    "attention.qkv": ColwiseParallel,
    "attention.proj": RowwiseParallel,
    "mlp.up": ColwiseParallel,
    "mlp.down": RowwiseParallel,
}


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, CONFIG.vocab_size, TOKENS, generator=generator)


def step(model: nn.Module, loss: Tensor) -> float:
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.3 * parameter.grad
            parameter.grad = None
    return loss.item()


def losses_of(model: nn.Module, batch: Tensor | None = None) -> list[float]:
    batch = tokens() if batch is None else batch
    return [step(model, next_token_loss(model(batch), batch)) for _ in range(STEPS)]


@functools.cache
@one_thread()
def of_one_process() -> list[float]:
    return losses_of(make_transformer(CONFIG, seed=1))


def shared_out(unit: ModuleType, comm: Any) -> nn.Sequential:
    model = make_transformer(CONFIG, seed=1)
    for block in model[1:-1]:
        unit.parallel_attention(comm, block.attention)
        unit.parallel_mlp(comm, block.mlp)
    return model


# ── programs of the ranks ───────────────────────────────────────────────────────────


def train(context: RankContext) -> list[float]:
    return losses_of(shared_out(load("tensor_parallel"), context.comm))


def train_on_mesh(context: RankContext) -> list[float]:
    """2 × 2: each model has half of the samples; the gradients are averaged."""
    unit = load("tensor_parallel")
    mesh = unit.make_mesh(context.comm, 2)
    model = shared_out(unit, mesh.tensor)
    mine = tokens().chunk(mesh.data.world_size)[mesh.data.rank]
    losses = []
    for _ in range(STEPS):
        loss = next_token_loss(model(mine), mine)
        loss.backward()
        for parameter in model.parameters():
            mesh.data.all_reduce(parameter.grad)
            parameter.grad /= mesh.data.world_size
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.3 * parameter.grad
                parameter.grad = None
        mean = loss.detach().clone()
        mesh.data.all_reduce(mean)
        losses.append(mean.item() / mesh.data.world_size)
    return losses


def train_torchs(context: RankContext, path: str) -> list[float]:
    """The same by parallelize_module, which cuts qkv in one piece: so in our order."""
    n = context.world_size
    store = dist.FileStore(path, n)
    dist.init_process_group("gloo", store=store, rank=context.rank, world_size=n)
    mesh = init_device_mesh("cpu", (n,))
    model = make_transformer(CONFIG, seed=1)
    for block in model[1:-1]:
        qkv = block.attention.qkv
        rows = torch.arange(qkv.out_features).unflatten(0, (3, n, -1))
        order = rows.transpose(0, 1).flatten()
        for parameter in qkv.parameters():
            parameter.data = parameter.data[order]
        parallelize_module(block, mesh, {k: way() for k, way in BLOCK_LAYERS.items()})
    losses = losses_of(model)
    leave_default_group()
    return losses


def train_on_tokens(context: RankContext) -> list[float]:
    """Sequence parallel between the blocks, and a loss on shared-out logits."""
    unit, comm = load("tensor_parallel"), context.comm
    model = make_transformer(CONFIG, seed=1)
    n, rank = comm.world_size, comm.rank
    for block in model[1:-1]:
        unit.parallel_attention(comm, block.attention, unit.SEQUENCE)
        unit.parallel_mlp(comm, block.mlp, unit.SEQUENCE)
    head = model[-1]
    head.logits = unit.ColumnParallelLinear(comm, head.logits, unit.copy_to_region)
    batch, losses = tokens(), []
    for _ in range(STEPS):
        x = model[0](batch).chunk(n, 1)[rank]
        for block in model[1:-1]:
            x = block(x)
        logits = head(unit.reduce_from_region(comm, placed(x, n, rank)))
        scores = logits[:, :-1].flatten(0, 1)
        loss = unit.vocab_parallel_cross_entropy(comm, scores, batch[:, 1:].flatten())
        loss.backward()
        for block in model[1:-1]:
            unit.all_reduce_replicated_grads(comm, block)
        for parameter in model[0].parameters():
            comm.all_reduce(parameter.grad)
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.3 * parameter.grad
                parameter.grad = None
    return losses


def users_block() -> nn.Module:
    """A block with frozen and transposed parameters."""
    block = make_transformer(CONFIG, seed=1)[1]
    for layer in map(block.get_submodule, BLOCK_LAYERS):
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    for name in FROZEN:
        block.get_parameter(name).requires_grad_(False)
    return block


def shard_users_block(context: RankContext, path: str = "") -> dict[str, Any]:
    """What becomes of its parameters; with a path by torch, else with SEQUENCE."""
    unit, comm, block = load("tensor_parallel"), context.comm, users_block()
    users = dict(block.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in users.items()}
    if path:
        n = comm.world_size
        store = dist.FileStore(path, n)
        dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=n)
        unit.with_torch(init_device_mesh("cpu", (n,)), block)
    else:
        unit.parallel_attention(comm, block.attention, unit.SEQUENCE)
        unit.parallel_mlp(comm, block.mlp, unit.SEQUENCE)
    x = torch.ones(2, 4, CONFIG.dim, dtype=torch.float64)
    block(x).sum().backward()
    if path:
        leave_default_group()
    else:
        unit.all_reduce_replicated_grads(comm, block)
    parameters = dict(block.named_parameters())
    return {
        "modified": [n for n, p in users.items() if not torch.equal(p, before[n])],
        "frozen": [name for name, p in parameters.items() if not p.requires_grad],
        "strided": [name for name, p in parameters.items() if not p.is_contiguous()],
    }


def placed(x: Tensor, n: int, rank: int) -> Tensor:
    """This rank's tokens at their places among zeros."""
    size = x.shape[1]
    return nn.functional.pad(x, (0, 0, rank * size, (n - 1 - rank) * size))


# ── the tests ───────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module", autouse=True)
def warm(cluster: Cluster) -> None:
    """Before ranks are forked: what each of them would import for itself."""
    cluster.warm("distlab.grading.warmup:one_step", __name__)


@pytest.fixture(scope="module")
def two_ranks(cluster: Cluster) -> Run:
    return cluster.run(train, 2, limits=Limits(seconds=60))


def expect_losses_of_one_process(run: Run) -> None:
    assert run.outcome == "finished", run.explanation
    for losses in run.values:
        assert losses == pytest.approx(of_one_process(), abs=1e-10)
    assert of_one_process()[-1] < of_one_process()[0] - 0.3


def test_losses_on_a_mesh_are_those_of_one_process(cluster: Cluster) -> None:
    expect_losses_of_one_process(
        cluster.run(train_on_mesh, 4, limits=Limits(seconds=60))
    )


def test_tokens_shared_out_take_a_pair_each_and_the_losses_are_the_same(
    cluster: Cluster,
) -> None:
    run = cluster.run(train_on_tokens, 2, limits=Limits(seconds=60))
    expect_losses_of_one_process(run)
    for record in run.ranks:
        ops = Counter(call["op"] for call in record.calls())
        # attention and MLP, there and back
        pairs = STEPS * CONFIG.num_layers * 2 * 2
        assert (ops["all_gather"], ops["reduce_scatter"]) == (pairs, pairs)


def test_heads_that_do_not_fit_are_refused() -> None:
    run = simulate(train, 3)
    assert run.outcome == "raised"
    assert re.search(r"\b4 heads\b.* 3\b", run.explanation)


def test_losses_are_those_of_torchs_parallelize_module(
    cluster: Cluster, two_ranks: Run, tmp_path: Any
) -> None:
    theirs = cluster.run(
        train_torchs, 2, str(tmp_path / "store"), limits=Limits(seconds=100)
    )
    assert theirs.outcome == "finished", theirs.explanation
    for losses in (two_ranks.values[0], of_one_process()):
        assert losses == pytest.approx(theirs.values[0], abs=1e-10)


def test_a_block_takes_two_all_reduces_there_and_two_back(two_ranks: Run) -> None:
    for record in two_ranks.ranks:
        assert {call["op"] for call in record.calls()} == {"all_reduce"}
        assert len(record.calls()) == STEPS * CONFIG.num_layers * 4
        sizes = {tuple(call["shape"]) for call in record.calls()}
        assert sizes == {(*TOKENS, CONFIG.dim)}


def test_it_runs_on_simulated_ranks() -> None:
    run = simulate(train, 4)
    assert run.outcome == "finished", run.explanation
    assert run.values[3] == pytest.approx(of_one_process(), abs=1e-10)


UNMODIFIED = {"modified": [], "frozen": FROZEN, "strided": []}


def test_the_users_weights_are_not_modified_and_frozen_ones_stay_frozen() -> None:
    run = simulate(shard_users_block, 2)
    assert run.outcome == "finished", run.explanation
    assert run.values == [UNMODIFIED] * 2


def test_with_torch_does_not_modify_them_either(
    cluster: Cluster, tmp_path: Any
) -> None:
    path = str(tmp_path / "store")
    run = cluster.run(shard_users_block, 2, path, limits=Limits(seconds=60))
    assert run.outcome == "finished", run.explanation
    assert [value["modified"] for value in run.values] == [[], []]
    assert [value["frozen"] for value in run.values] == [FROZEN] * 2
