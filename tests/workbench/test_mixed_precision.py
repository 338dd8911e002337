"""Mixed precision beside torch's own: GradScaler's staircase, FSDP2's master weights.

The checks go by closed forms; here the same numbers come out of torch's classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import distlab.distributed as distributed
from distlab.comm import leave_default_group
from distlab.curriculum.units import load
from distlab.grading.checks.mixed_precision import loss_scaler_runs as runs
from distlab.runner import Cluster, Limits, RankContext, Run
from distlab.sim import run as simulate

RANKS = 3
SEED = 11
STEPS = 3
POLICY_TOLERANCE = 1e-6  # float32: FSDP sums in another order


@pytest.fixture(scope="module", autouse=True)
def warm(cluster: Cluster) -> None:
    """Before ranks are forked: what each of them would import for itself."""
    needed = "torch._dynamo", "torch.distributed.fsdp", __name__
    cluster.warm("distlab.grading.warmup:one_step", *needed)


@pytest.fixture(scope="module")
def unit() -> ModuleType:
    return load("mixed_precision", "reference")


def ran(cluster: Cluster, scenario: Any, *values: Any) -> Run:
    run = cluster.run(scenario, RANKS, *values, limits=Limits(seconds=60), seed=SEED)
    assert run.outcome == "finished", run
    return run


def reference_scaled_steps(context: RankContext) -> list[dict[str, Any]]:
    return runs.scaled_steps(context, load("mixed_precision", "reference"), SEED)


def torch_scaler_on_all_ranks() -> tuple[list[float], list[bool]]:
    """One GradScaler over the parameters of all ranks: what overflows on one counts."""
    scaler = torch.amp.GradScaler("cpu", **runs.SETTINGS)
    halves = [nn.Parameter(torch.ones(2, 3).half()) for _ in range(RANKS)]
    masters = [nn.Parameter(torch.ones(2, 3)) for _ in range(RANKS)]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    scales, taken = [], []
    for step in range(runs.STEPS):
        losses = []
        for rank, half in enumerate(halves):
            half.grad = None
            gradient = runs.raw_gradient(SEED, step, rank, RANKS)
            losses.append((half.float() * gradient).sum())
        scaler.scale(torch.stack(losses).sum()).backward()
        for rank, (half, master) in enumerate(zip(halves, masters, strict=True)):
            assert half.grad is not None
            master.grad = half.grad.float()
            if step == runs.NO_GRADIENT_AT and rank == 0:
                master.grad = None
        before = masters[1].detach().clone()
        scaler.step(optimizer)
        taken.append(not torch.equal(before, masters[1]))
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, taken


def test_the_staircase_is_that_of_torchs_grad_scaler(cluster: Cluster) -> None:
    scales, taken = torch_scaler_on_all_ranks()
    assert len(set(scales)) >= 4
    assert taken.count(False) >= 3
    for rank in ran(cluster, reference_scaled_steps).values:
        assert [record["next"] for record in rank] == scales
        assert [record["said"] for record in rank] == taken


def test_it_is_the_same_in_the_simulated_cluster() -> None:
    run = simulate(reference_scaled_steps, RANKS, seed=SEED)
    found = [[record["next"] for record in rank] for rank in run.values]
    assert found == runs.scales(SEED, RANKS)


def test_without_asking_the_others_torchs_scalers_part() -> None:
    """What makes the question to all ranks necessary: a GradScaler per rank."""
    alone = runs.scales(SEED, RANKS, runs.own_rank)
    assert len({tuple(rank) for rank in alone}) > 1
    assert runs.scales(SEED, RANKS) == [torch_scaler_on_all_ranks()[0]] * RANKS


def test_a_thousand_tiny_updates_survive_with_a_real_optimizer(
    unit: ModuleType,
) -> None:
    model = nn.Linear(4, 1, bias=False).bfloat16()
    plain = nn.Parameter(torch.ones(1, 4).bfloat16())
    nn.init.ones_(model.weight)
    master = unit.master_copy(model)
    wide = torch.optim.SGD(master, lr=1e-3)
    narrow = torch.optim.SGD([plain], lr=1e-3)
    for _ in range(1000):
        master[0].grad = torch.full((1, 4), -1.0)
        plain.grad = torch.full((1, 4), -1.0).bfloat16()
        wide.step()
        narrow.step()
        unit.master_to_model(master, model)
    assert torch.equal(plain.detach(), torch.ones(1, 4).bfloat16())
    assert torch.allclose(master[0], torch.full((1, 4), 2.0), atol=1e-4)
    assert torch.equal(model.weight, torch.full((1, 4), 2.0).bfloat16())


class Net(nn.Module):
    """A small network whose outputs FSDP leaves in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 9), nn.Linear(9, 3)
        generator = torch.Generator().manual_seed(SEED)
        for parameter in self.parameters():
            # Equal starts: what bfloat16 can hold is the same in both.
            values = torch.randn(parameter.shape, generator=generator).bfloat16()
            parameter.data.copy_(values.float())

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.outer(torch.tanh(self.inner(inputs)))
        return outputs


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 6, generator=generator)
    return inputs, torch.randint(0, 3, (8,), generator=generator)


def ours(context: RankContext) -> list[Tensor]:
    unit = load("mixed_precision", "reference")
    model = Net().bfloat16()
    master = unit.master_copy(model)
    optimizer = torch.optim.SGD(master, lr=0.1, momentum=0.9)
    loss_fn = nn.functional.cross_entropy
    for step in range(STEPS):
        unit.train_step(
            context.comm, model, master, optimizer, loss_fn, *batch(step, context.rank)
        )
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    return [m.detach().clone() for m in master]


def fsdp2(context: RankContext, meeting: str) -> list[Tensor]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    store = dist.FileStore(meeting, context.world_size)
    dist.init_process_group(
        "gloo", store=store, rank=context.rank, world_size=context.world_size
    )
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    model = Net()
    mesh = dist.init_device_mesh("cpu", (context.world_size,))
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        inputs, targets = batch(step, context.rank)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs).float(), targets).backward()
        optimizer.step()
    whole = [p.full_tensor().detach().clone() for p in model.parameters()]
    leave_default_group()
    return whole


def test_master_weights_are_those_of_fsdp2(cluster: Cluster, tmp_path: Path) -> None:
    peer = ran(cluster, fsdp2, str(tmp_path / "meeting"))
    for mine, theirs in zip(ran(cluster, ours).values, peer.values, strict=True):
        for master, shard in zip(mine, theirs, strict=True):
            assert master.dtype == shard.dtype == torch.float32
            assert torch.allclose(master, shard, atol=POLICY_TOLERANCE)


# ── what a scaler remembers: for each optimizer, and for one step ───────────────────


def shards_with_a_scaler(context: RankContext) -> dict[str, Any]:
    """ZeRO stages 1 and 2, with and without an overflow; nobody calls reduce_gradients.

    The weights of the step, and whether it was taken.
    """
    sharded = load("sharded_optimizer", "reference")
    scaling = load("mixed_precision", "reference")
    found: dict[str, Any] = {}
    for stage in (1, 2):
        for kind, factor in (("fine", 1.0), ("inf", torch.inf)):
            torch.manual_seed(3)
            model = nn.Linear(3, 5).double()
            make = partial(torch.optim.SGD, lr=0.1)
            optimizer = sharded.ShardedOptimizer(
                context.comm, model, [{"params": list(model.parameters())}], make
            )
            optimizer = sharded.at_stage(stage, optimizer)
            scaler = scaling.LossScaler(context.comm, init_scale=1024.0)
            loss = model(torch.ones(2, 3).double() * (1 + context.rank)).sum()
            last = context.rank == context.world_size - 1
            scaler.scale(loss * (factor if last else 1.0)).backward()
            taken = scaler.step(optimizer)
            scaler.update()
            weights = {n: t.clone() for n, t in optimizer.full_state_dict().items()}
            found[f"{stage} {kind}"] = taken, weights["weight"]
    return found


def test_a_scaler_sees_the_gradients_of_shards(cluster: Cluster) -> None:
    torch.manual_seed(3)
    before = nn.Linear(3, 5).double().weight.detach()
    inputs = sum(2 * (1 + rank) for rank in range(RANKS))
    for found in ran(cluster, shards_with_a_scaler).values:
        for stage in (1, 2):
            taken, weight = found[f"{stage} fine"]
            assert taken is True
            assert torch.allclose(weight, before - 0.1 * inputs / RANKS)
            taken, weight = found[f"{stage} inf"]
            assert taken is False
            assert torch.equal(weight, before)


@pytest.fixture
def scaler(unit: ModuleType) -> Iterator[Any]:
    distributed.init_process_group("tcp", world_size=1, rank=0)
    yield unit.LossScaler(distributed.default_comm(), init_scale=8.0)
    distributed.destroy_process_group()


def test_backward_after_unscale_is_refused(scaler: Any) -> None:
    weight, later = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.SGD([weight, later], lr=0.1)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 1.0]
    scaler.scale(weight.sum()).backward()
    with pytest.raises(RuntimeError, match="1"):
        scaler.unscale_(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.scale(later.sum()).backward()
    with pytest.raises(RuntimeError, match="1"):
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(weight.sum()).backward()
    assert scaler.step(optimizer)


def test_one_optimizers_step_may_be_followed_by_anothers_backward(scaler: Any) -> None:
    """A GAN: the generator's loss goes through the discriminator, after its step."""
    maker, judge = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    both = torch.optim.SGD([maker], lr=0.1), torch.optim.SGD([judge], lr=0.1)
    for _ in range(2):
        for one in both:
            one.zero_grad()
        scaler.scale((judge * maker.detach()).sum()).backward()
        assert scaler.step(both[1])
        scaler.scale((judge * maker).sum()).backward()
        assert scaler.step(both[0])
        scaler.update()
    scaler.unscale_(both[0])
    with pytest.raises(RuntimeError, match="two optimizers"):
        scaler.unscale_(torch.optim.SGD([maker], lr=0.1))


def test_a_sparse_gradient_is_refused(scaler: Any) -> None:
    words = nn.Embedding(4, 2, sparse=True)
    scaler.scale(words(torch.tensor([1, 1])).sum()).backward()
    with pytest.raises(ValueError, match="sparse=False"):
        scaler.step(torch.optim.SGD(words.parameters(), lr=0.1))


def test_calls_that_do_not_end_one_step_are_refused(scaler: Any) -> None:
    """An update() for each microbatch; a second step() with the same gradients."""
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    both = torch.optim.SGD([weight], lr=1.0), torch.optim.SGD([other], lr=1.0)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(RuntimeError, match=r"update\(\)"):
        scaler.update()
    assert (scaler.loss_scale, scaler.good_steps) == (8.0, 0)
    scaler.scale(weight.sum() + other.sum()).backward()
    assert scaler.step(both[0])
    with pytest.raises(RuntimeError, match=r"step\(\)"):
        scaler.step(both[0])
    assert weight.tolist() == [-1.0, -1.0], "two microbatches, one step"
    assert scaler.step(both[1]), "another optimizer may step"
    scaler.update()
    assert scaler.good_steps == 1
    scaler.load_state_dict(scaler.state_dict())
    with pytest.raises(RuntimeError, match=r"update\(\)"):
        scaler.update()


def test_a_scaler_loads_the_state_of_torchs(scaler: Any) -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=9)
    weight = nn.Parameter(torch.ones(1))
    theirs.scale(weight.sum()).backward()
    theirs.step(torch.optim.SGD([weight], lr=0.1))
    theirs.update()
    scaler.load_state_dict(theirs.state_dict())
    assert (scaler.loss_scale, scaler.good_steps) == (512.0, 1)


DISABLED = torch.amp.GradScaler("cpu", enabled=False).state_dict()


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ({"cur_scale": 8.0, "cur_iter": 3}, ["cur_scale", "loss_scale", "good_steps"]),
        (DISABLED, ["nothing", "loss_scale"]),
        ([8.0, 0], ["loss_scale"]),
        ({"loss_scale": 8.0}, ["good_steps"]),
        ({"loss_scale": 0.0, "good_steps": 0}, ["loss_scale=0.0"]),
        ({"loss_scale": torch.nan, "good_steps": 0}, ["loss_scale=nan"]),
        ({"loss_scale": 8.0, "good_steps": -1}, ["good_steps=-1"]),
        ({"scale": "much", "_growth_tracker": 0}, ["much"]),
    ],
)
def test_a_state_that_is_not_a_scalers_is_refused(
    scaler: Any, state: Any, names: list[str]
) -> None:
    with pytest.raises(ValueError, match=names[0]) as raised:
        scaler.load_state_dict(state)
    assert all(name in str(raised.value) for name in names)
    assert (scaler.loss_scale, scaler.good_steps) == (8.0, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("init_scale", 0.0),
        ("init_scale", float("nan")),
        ("init_scale", float("inf")),
        ("init_scale", 1e-30),
        ("growth_factor", 0.5),
        ("growth_factor", float("inf")),
        ("backoff_factor", 1.0),
        ("backoff_factor", 0.0),
        ("growth_interval", 0),
    ],
)
def test_settings_that_cannot_work_are_refused(
    unit: ModuleType, name: str, value: float
) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        unit.LossScaler(None, **{name: value})


def test_a_refused_scale_is_told_the_range(unit: ModuleType, scaler: Any) -> None:
    with pytest.raises(ValueError, match=r"5\.4e-20 … 8\.5e\+37"):
        unit.LossScaler(None, init_scale=1e38)
    with pytest.raises(ValueError, match=r"5\.4e-20"):
        scaler.load_state_dict({"loss_scale": 1e-30, "good_steps": 0})
    unit.LossScaler(None, init_scale=8.5e37)


def test_the_scale_never_becomes_zero_or_infinite(scaler: Any) -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def steps(value: float) -> None:
        for _ in range(200):
            weight.grad = torch.tensor([value])
            scaler.step(optimizer)
            scaler.update()

    scaler.growth_interval = 1
    steps(1.0)
    assert scaler.loss_scale == 2.0**126
    with pytest.raises(FloatingPointError, match="e-20"):
        steps(torch.nan)
