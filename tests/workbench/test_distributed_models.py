"""`distlab.distributed`: models in shards, in stages, and with checkpoints."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import distlab.distributed as dist
from distlab.distributed.model_parallel import _Boundary
from distlab.distributed.weights import EVERY
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


class Pair(nn.Linear):
    """A block that returns two tensors."""

    def forward(self, input: Tensor) -> Any:
        return super().forward(input), input


def test_a_block_that_cannot_be_run_again_is_refused() -> None:
    pair, inputs = Pair(2, 2), torch.ones(3, 2)
    with dist.checkpoint_scope(pair):
        with pytest.raises(ValueError, match=r"\btuple\b"):
            pair(inputs)
        with pytest.raises(ValueError, match=r"\bposition\b"):
            pair(input=inputs)
    block = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with dist.checkpoint_scope(block):
        loss = block(inputs).sum()
    with torch.no_grad():
        block[0].weight += 1
    with pytest.raises(RuntimeError, match=r"\bparameter\b"):
        loss.backward()


def test_a_block_is_run_again_in_the_mode_of_its_forward() -> None:
    block, gradients = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), []
    for blocks in ((block,), (nn.Identity(),)):
        block.train().zero_grad()
        torch.manual_seed(0)
        with dist.checkpoint_scope(*blocks):
            loss = block(torch.ones(3, 8)).sum()
        block.eval()
        loss.backward()
        gradients.append(block[0].weight.grad.clone())
        assert not block[1].training
    assert torch.equal(*gradients)


def odd_batches(context: RankContext) -> list[str]:
    rank, _ = begin(context)
    mse, sample = nn.functional.mse_loss, torch.zeros(2)
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    model = dist.PipelineParallel(layers, sample, mse, num_microbatches=2)
    rows, total = torch.ones(4, 2), nn.MSELoss(reduction="sum")
    found = [
        refused(lambda: model.train_batch(rows, rows[:2])),
        refused(lambda: model.train_batch(rows[rank:], rows[rank:])),
        refused(
            lambda: dist.PipelineParallel(layers, sample, total, num_microbatches=2)
        ),
    ]
    with torch.no_grad():
        found.append(refused(lambda: model.train_batch(rows, rows)))
    assert model.train_batch(rows, rows) >= 0
    return found


def test_a_batch_that_does_not_fit_is_refused_on_every_rank(cluster: Cluster) -> None:
    for found in ranks(cluster, odd_batches, 2):
        assert re.search(r"\b4\b.*\b2\b", found[0])
        assert re.search(r"\b4\b.*\b3\b", found[1])
        assert "sum" in found[2]
        assert "no_grad" in found[3]


def odd_boundaries(context: RankContext) -> dict[str, Any]:
    """Stages that end in bfloat16, one without a gradient, one of another shape."""
    rank, _ = begin(context)
    mse, rows = nn.functional.mse_loss, torch.arange(16.0).view(8, 2) / 16

    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(2, 2) for _ in range(3)]

    def trained(frozen: int, dtype: torch.dtype | None, inside: bool) -> bool:
        own, alone = layers(), nn.Sequential(*layers())
        for part in (own[:frozen], alone[:frozen]):
            for layer in part:
                layer.requires_grad_(False)
        autocast = torch.autocast("cpu", dtype, enabled=dtype is not None)
        with autocast if inside else nullcontext():
            model = dist.PipelineParallel(own, rows[0], mse, num_microbatches=2)
        with autocast:
            loss = model.train_batch(rows, rows + 1)
            expected = mse(alone(rows), rows + 1)
        expected.backward()
        mine, theirs = own[rank].weight.grad, alone[rank].weight.grad
        assert loss == pytest.approx(float(expected), rel=1e-2)
        if mine is None or theirs is None:
            return mine is theirs
        return torch.allclose(mine, theirs, rtol=2e-2, atol=1e-3)

    return {
        "autocast": trained(0, torch.bfloat16, inside=False),
        "made in autocast": trained(0, torch.bfloat16, inside=True),
        "first frozen": trained(1, None, inside=False),
        "two frozen": trained(2, torch.bfloat16, inside=False),
    }


def test_stages_send_what_the_next_one_expects(cluster: Cluster) -> None:
    for found in ranks(cluster, odd_boundaries, 3):
        assert all(found.values()), found


def test_a_stage_of_another_shape_is_refused() -> None:
    flat = _Boundary(nn.Flatten(), torch.zeros(4))
    assert flat(torch.zeros(3, 2, 2)).shape == (3, 4)
    with pytest.raises(ValueError, match=r"\(6,\).*\(4,\)"):
        flat(torch.zeros(3, 2, 3))
    with pytest.raises(ValueError, match=r"\btuple\b"):
        _Boundary(Pair(4, 4), torch.zeros(4))(torch.zeros(3, 4))


# ── what the parts of a model share ─────────────────────────────────────────────────


def embedded(seed: int) -> list[nn.Module]:
    """The first and the last layer have one weight, and so do two in the middle."""
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 4).double() for _ in range(6)]
    layers[5].weight = layers[0].weight
    layers[3].weight = layers[2].weight
    return [*layers[:3], nn.Tanh(), *layers[3:]]


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = 3, 2, 8, 4  # steps, inputs and targets, samples, features
    values = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return [(5 * x, y) for x, y in values]


def tied_alone() -> dict[str, Any]:
    model = nn.Sequential(*embedded(0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    norms = []
    for step, (x, y) in enumerate(batches()):
        if step != 1:  # the gradients of two batches in the second step
            optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
    return {"weights": [p.detach() for p in model.parameters()], "norms": norms}


def tied_in_stages(context: RankContext, num_chunks: int) -> dict[str, Any]:
    rank, _ = begin(context)
    model = dist.PipelineParallel(
        embedded(rank),
        torch.zeros(4, dtype=torch.float64),
        nn.functional.mse_loss,
        num_microbatches=4,
        num_chunks=num_chunks,
        costs=[1.0] * 7,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    norms = []
    for step, (x, y) in enumerate(batches()):
        if step != 1:
            optimizer.zero_grad()
        model.train_batch(x, y)
        norms.append(float(model.clip_grad_norm_(0.2)))
        optimizer.step()
    return {"weights": [p.detach() for p in model.parameters()], "norms": norms}


@pytest.mark.parametrize(("n", "num_chunks"), [(2, 1), (3, 1), (2, 2)])
def test_a_weight_of_several_stages_trains_as_in_one_process(
    cluster: Cluster, n: int, num_chunks: int
) -> None:
    alone = tied_alone()
    found = ranks(cluster, tied_in_stages, n, num_chunks)
    for own in found:
        assert own["norms"] == pytest.approx(alone["norms"], rel=1e-6)
        for weight in own["weights"]:
            assert any(
                weight.shape == other.shape and torch.allclose(weight, other, rtol=1e-9)
                for other in alone["weights"]
            )
    num_weights = sum(len(own["weights"]) for own in found)
    assert num_weights > len(alone["weights"])  # some rank has a copy


class Halves(nn.Module):
    """An MLP with a dropout of its hidden channels, whose masks it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32).double(), nn.Linear(32, 8).double()
        self.inside, self.after = nn.Dropout(0.5), nn.Dropout(0.5)
        self.masks: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.up(inputs)
        inside = self.inside(torch.ones_like(hidden))
        outputs = self.down(hidden * inside)
        after = self.after(torch.ones_like(outputs))
        self.masks += [inside.detach(), after.detach()]
        return outputs * after + inputs


def drawn(context: RankContext, are_equal: bool) -> dict[str, Any]:
    rank, _ = begin(context)
    torch.manual_seed(0)
    model = dist.TensorParallel(
        nn.Sequential(Halves(), Halves(), nn.LayerNorm(8)).double()
    )
    torch.manual_seed(5 if are_equal else 5 + rank)
    inputs, found = torch.ones(3, 8, dtype=torch.float64), dict[str, Any]()
    gradients = []
    for is_scoped in (False, True):
        state = torch.get_rng_state()
        model.zero_grad()
        with dist.checkpoint_scope(*model.module[:2]) if is_scoped else nullcontext():
            outputs = model(inputs.clone().requires_grad_())
        outputs.pow(3).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
        found["next"] = torch.rand(2)
        torch.set_rng_state(state)
    found["replayed"] = all(map(torch.equal, *gradients))
    found["outputs"] = outputs.detach()
    found["masks"] = [*model.module[0].masks[:2], *model.module[1].masks[:2]]
    full = list(model.module[2].parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found["norm"] = float(model.clip_grad_norm_(0.5))
    optimizer.step()
    found["full"] = torch.cat([p.detach() for p in full])
    return found


@pytest.mark.parametrize("are_equal", [False, True])
def test_random_numbers_agree_outside_of_shards_and_differ_inside(
    cluster: Cluster, are_equal: bool
) -> None:
    first, second = ranks(cluster, drawn, 2, are_equal)
    for found in (first, second):
        assert found["replayed"]
        assert not torch.equal(found["masks"][0], found["masks"][2])
        assert not torch.equal(found["masks"][1], found["masks"][3])
    same = [
        torch.equal(*pair) for pair in zip(first["masks"], second["masks"], strict=True)
    ]
    assert same == [False, True, False, True]
    assert torch.equal(first["outputs"], second["outputs"])
    assert torch.equal(first["full"], second["full"])
    assert first["norm"] == second["norm"]
    assert torch.equal(first["next"], second["next"]) == are_equal


def clipped(context: RankContext) -> dict[str, Any]:
    rank, _ = begin(context)
    found: dict[str, Any] = {"norms": []}
    model = dist.TensorParallel(make_transformer(CONFIG, seed=rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        next_token_loss(model(tokens()), tokens()).backward()
        found["norms"].append(float(model.clip_grad_norm_(0.5)))
        optimizer.step()
    found["tied"] = refused(tied_head)
    found["parametrized"] = refused(parametrized)
    found["inputs"] = refused(lambda: other_inputs(rank))
    found["inputs later"] = refused(lambda: other_inputs(rank, num_equal=EVERY))
    found["shapes"] = refused(lambda: other_inputs(rank, rows=2 + rank))
    found["shapes later"] = refused(lambda: model(tokens()[: 4 + rank]))
    found["torch's"] = refused(
        lambda: nn.utils.clip_grad_norm_(list(model.parameters()), 0.5)
    )
    found["copy's"] = refused(lambda: clip_a_copy(model))
    for layer in (nn.PReLU(), nn.Softmax(-1), nn.LayerNorm(8 // 2)):
        found[type(layer).__name__] = refused(lambda layer=layer: with_inside(layer))
    with_inside(nn.Sequential(nn.GELU(), nn.Dropout(0.5)))
    found["replicated"] = refused(lambda: dist.DistributedDataParallel(model))
    alone = nn.Linear(2, 2)
    alone(torch.ones(1, 2)).sum().backward()
    found["alone"] = float(nn.utils.clip_grad_norm_(alone.parameters(), 0.5))
    return found


def clip_a_copy(model: dist.TensorParallel) -> None:
    twin = copy.deepcopy(model)
    outputs = twin(tokens())
    assert torch.equal(outputs, model(tokens()))
    next_token_loss(outputs, tokens()).backward()
    assert twin.clip_grad_norm_(0.5) > 0.5
    nn.utils.clip_grad_norm_(twin.parameters(), 0.5)


def with_inside(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 4), nn.LayerNorm(4))
    dist.TensorParallel(model, plan={"0": "column", "2": "row"})(torch.ones(2, 4))


def refused(act: Callable[[], Any]) -> str:
    try:
        act()
    except ValueError as error:
        return str(error)
    return ""


def tied_head() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    dist.TensorParallel(model, plan={"1": "column"})


def parametrized() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))
    dist.TensorParallel(nn.Sequential(layer), plan={"0": "column"})


def other_inputs(rank: int, rows: int = 2, num_equal: int = 0) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    wrapped = dist.TensorParallel(model, plan={"0": "column", "1": "row"})
    for _ in range(num_equal):
        wrapped(torch.ones(rows, 4))
    wrapped(torch.full((rows, 4), float(rank)))


def test_shards_are_clipped_as_one_gradient_and_refuse_what_they_would_break(
    cluster: Cluster,
) -> None:
    model, norms = make_transformer(CONFIG), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        next_token_loss(model(tokens()), tokens()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    for found in ranks(cluster, clipped, 2):
        assert found["norms"] == pytest.approx(norms, rel=1e-6)
        assert re.match(r"0\.weight .*\b1\.weight\b", found["tied"])
        assert re.match(r"0 .*\bparametrization\b", found["parametrized"])
        for name in ("inputs", "inputs later"):
            assert re.search(r"\brank 1\b.*\brank 0\b", found[name])
        assert re.search(r"\brank 0\b.*\(2, 4\).*\(3, 4\)", found["shapes"])
        assert re.search(r"\(4, 16\).*\(5, 16\)", found["shapes later"])
        for name in ("torch's", "copy's", "replicated"):
            assert re.search(r"\bTensorParallel\b", found[name]), name
        for name in ("PReLU", "Softmax", "LayerNorm"):
            assert re.search(rf"\b{name}\b", found[name]), name
        assert found["alone"] > 0


def drawn_in_stages(context: RankContext) -> list[Tensor]:
    begin(context)
    torch.manual_seed(0)
    masks: list[Tensor] = []

    class Masked(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            mask = nn.functional.dropout(torch.ones_like(inputs), 0.5, self.training)
            masks.extend([mask] if self.training else [])
            return inputs * mask

    layers = [nn.Linear(16, 16), Masked(), nn.Linear(16, 16), Masked()]
    model = dist.PipelineParallel(
        layers, torch.zeros(16), nn.functional.mse_loss, num_microbatches=2
    )
    for _ in range(2):
        model.train_batch(torch.ones(4, 16), torch.ones(4, 16))
    return masks


def test_stages_draw_other_numbers_from_equal_seeds(cluster: Cluster) -> None:
    first, second = ranks(cluster, drawn_in_stages, 2)
    masks = [*first, *second]
    assert len(masks) == 8
    for k, mask in enumerate(masks):
        assert not any(torch.equal(mask, other) for other in masks[:k])


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
