"""torch.distributed code on simulated ranks: its results, times and verdicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from benchmarks import buckets
from benchmarks._bars import missed
from distlab.runner import Cluster
from distlab.sim import AlphaBeta, SimRun
from distlab.sim import torch as sim_torch
from distlab.sim.faults import Faults
from tests.workbench.conformance import torch_calls

NET = AlphaBeta(alpha_s=1e-6, bytes_per_s=1e9)


def make_model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, 4)).to(dtype)


def make_batch(ranks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * ranks, 16, generator=generator, dtype=dtype)
    return inputs, torch.randn(2 * ranks, 4, generator=generator, dtype=dtype)


def train(model: nn.Module, inputs: Tensor, targets: Tensor) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model


def my_rows(rows: Tensor) -> Tensor:
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def train_ddp() -> list[Tensor]:
    dist.init_process_group("gloo")
    batch = make_batch(dist.get_world_size(), torch.float64)
    model = DistributedDataParallel(make_model(torch.float64), bucket_cap_mb=0.002)
    train(model, *map(my_rows, batch))
    return [parameter.detach() for parameter in model.parameters()]


def train_fsdp2() -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    batch = make_batch(dist.get_world_size(), torch.float32)
    model = make_model(torch.float32)
    for layer in (model[0], model[2], model[4], model):
        fully_shard(layer)
    train(model, *map(my_rows, batch))
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def largest_error(done: SimRun, ranks: int, dtype: torch.dtype) -> float:
    alone = train(make_model(dtype), *make_batch(ranks, dtype))
    return max(
        float((mine - theirs).detach().abs().max())
        for values in done.require_finished().values
        for mine, theirs in zip(values, alone.parameters(), strict=True)
    )


@pytest.mark.parametrize("ranks", [5, 64])
def test_ddp_ends_where_one_process_does(ranks: int) -> None:
    done = sim_torch.run(train_ddp, ranks)
    assert largest_error(done, ranks, torch.float64) <= 1e-10


def test_fsdp2_ends_where_one_process_does() -> None:
    done = sim_torch.run(train_fsdp2, 4)
    assert largest_error(done, 4, torch.float32) <= 1e-4


def train_otherwise(way: str) -> list[Tensor]:
    """DDP in one of the ways that wait where the kernel cannot look."""
    batch = make_batch(dist.get_world_size(), torch.float64)
    options = {way: True} if way in ("static_graph", "gradient_as_bucket_view") else {}
    model = DistributedDataParallel(
        make_model(torch.float64), bucket_cap_mb=0.002, **options
    )
    if way == "comm_hook":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    with Join([model], enable=way == "join"):
        train(model, *map(my_rows, batch))
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "way", ["static_graph", "gradient_as_bucket_view", "comm_hook", "join"]
)
def test_ddp_in_its_other_ways(way: str) -> None:
    done = sim_torch.run(train_otherwise, 3, way)
    assert largest_error(done, 3, torch.float64) <= 1e-10


def tensor_parallel() -> tuple[float, float]:
    """The loss of two layers in halves, and the seconds that took."""
    model = make_model(torch.float64)
    inputs, _ = make_batch(4, torch.float64)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    started = sim_torch.now_s()
    loss = model(inputs).sum().item()
    return loss, sim_torch.now_s() - started


def test_tensor_parallel_layers_are_charged_for_their_part() -> None:
    inputs, _ = make_batch(4, torch.float64)
    alone = make_model(torch.float64)(inputs).sum().item()
    fast = AlphaBeta(alpha_s=0.0, bytes_per_s=1e18)
    done = sim_torch.run(tensor_parallel, 2, net=fast, flops_per_s=1e9)
    products = 2 * 8 * (16 * 32 / 2 + 32 * 32 / 2 + 32 * 4)  # the last one is whole
    for loss, seconds in done.require_finished().values:
        assert loss == pytest.approx(alone, rel=1e-12)
        assert seconds == pytest.approx(products / 1e9, rel=1e-9)


def stage_of_a_pipeline(num_parts: int) -> Tensor:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(n)]
    stage = PipelineStage(layers[rank], rank, n, torch.device("cpu"))
    schedule = Schedule1F1B(stage, num_parts, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(1)
    inputs, targets = torch.randn(2, 2 * num_parts, 8)
    given = (inputs,) if rank == 0 else ()
    schedule.step(*given, **({"target": targets} if rank == n - 1 else {}))
    gradient = layers[rank].weight.grad
    assert gradient is not None
    return gradient


def test_torchs_own_pipeline_gives_the_gradients_of_one_process() -> None:
    done = sim_torch.run(stage_of_a_pipeline, 3, 4).require_finished()
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(3)]
    torch.manual_seed(1)
    inputs, targets = torch.randn(2, 8, 8)
    nn.functional.mse_loss(nn.Sequential(*layers)(inputs), targets).backward()
    for layer, gradient in zip(layers, done.values, strict=True):
        torch.testing.assert_close(layer.weight.grad, gradient)


def seen(done: SimRun) -> list[Any]:
    """All that a run's journals say, but for addresses in memory."""
    events = [event for record in done.ranks for event in record.journal]
    return [{k: v for k, v in event.items() if k != "ptr"} for event in events]


def test_the_same_code_gives_the_same_run() -> None:
    first, second = (sim_torch.run(train_ddp, 4, net=NET) for _ in range(2))
    assert first.trace_hash == second.trace_hash
    assert first.time_s == second.time_s
    assert seen(first) == seen(second)
    assert len(seen(first)) > 100


# ── the same results as real processes ──────────────────────────────────────────────


def test_every_call_has_the_result_that_gloo_gives(
    cluster: Cluster, tmp_path: Any
) -> None:
    real = cluster.run(
        torch_calls.on_gloo, 3, str(tmp_path / "meeting")
    ).require_finished()
    simulated = sim_torch.run(torch_calls.everything, 3).require_finished()
    for mine, theirs in zip(simulated.values, real.values, strict=True):
        assert mine == theirs
    assert len(real.values[0]) >= 20


def coalesced() -> list[list[float]]:
    """What gloo has no answer to, and NCCL does."""
    many = [torch.ones(2), torch.ones(3)]
    with dist._coalescing_manager(device=torch.device("cpu")):
        for tensor in many:
            dist.all_reduce(tensor)
    parts = [torch.empty(1), torch.empty(1)]
    ours: Any = dist.group.WORLD
    for part, row in zip(parts, many, strict=True):
        ours.reduce_scatter([part], [[row[:1], row[1:2], row[:1]]]).wait()
    return [tensor.tolist() for tensor in (*many, *parts)]


def test_several_calls_in_one() -> None:
    for value in sim_torch.run(coalesced, 3).require_finished().values:
        assert value == [[3.0] * 2, [3.0] * 3, [9.0], [9.0]]


# ── time ────────────────────────────────────────────────────────────────────────────


def overlap(flops: int) -> tuple[float, float]:
    """Compute while an all-reduce is under way; the clock before and after."""
    rows = flops // (2 * 10 * 10)
    left, right, big = torch.ones(rows, 10), torch.ones(10, 10), torch.ones(1000)
    started = sim_torch.now_s()
    work = dist.all_reduce(big, async_op=True)
    assert work is not None
    left @ right
    computed = sim_torch.now_s()
    work.wait()
    return computed - started, sim_torch.now_s() - started


@pytest.mark.parametrize("flops", [2_000, 20_000, 200_000])
def test_compute_takes_its_operations_and_overlaps_with_transfers(flops: int) -> None:
    done = sim_torch.run(overlap, 4, flops, net=NET, flops_per_s=1e9)
    transfer = 2 * 3 * (1e-6 + 1000 / 1e9)  # a ring of 4, chunks of 1,000 bytes
    for computed, both in done.require_finished().values:
        assert computed == pytest.approx(flops / 1e9, rel=1e-9)
        assert both == pytest.approx(max(flops / 1e9, transfer), rel=1e-9)


def forward_and_backward() -> tuple[float, float]:
    layer = nn.Linear(20, 30, bias=False)
    inputs = torch.ones(10, 20, requires_grad=True)
    outputs = layer(inputs)
    forward = sim_torch.now_s()
    outputs.sum().backward()
    return forward, sim_torch.now_s() - forward


def test_backward_is_charged_two_products_for_one() -> None:
    done = sim_torch.run(forward_and_backward, 2, flops_per_s=1e9)
    product = 2 * 10 * 20 * 30 / 1e9
    for forward, backward in done.require_finished().values:
        assert forward == pytest.approx(product)
        assert backward == pytest.approx(2 * product)


def test_a_straggler_holds_the_others_up() -> None:
    slow = Faults(straggler={1: 3.0})
    done = sim_torch.run(
        overlap, 2, 200_000, net=NET, flops_per_s=1e9, faults=slow
    ).require_finished()
    seconds = [computed for computed, _ in done.values]
    assert seconds == pytest.approx([200e-6, 600e-6], rel=1e-9)


def poll_and_follow() -> tuple[int, list[float], float]:
    tensor = torch.ones(2)
    work, looks = dist.all_reduce(tensor, async_op=True), 1
    assert work is not None
    while not work.is_completed():
        looks += 1
    work.wait()
    second = dist.all_reduce(tensor, async_op=True)
    assert second is not None
    doubled = second.get_future().then(lambda done: done.value()[0] * 2)
    return looks, doubled.wait().tolist(), sim_torch.now_s()


def test_polling_ends_and_futures_follow_each_other() -> None:
    done = sim_torch.run(poll_and_follow, 2, net=AlphaBeta(alpha_s=5e-6))
    for looks, doubled, now_s in done.require_finished().values:
        assert 2 < looks < 20  # a look takes a microsecond, the transfer 10
        assert doubled == [8.0, 8.0]
        assert now_s == pytest.approx(20e-6, rel=0.1)


def test_the_bucket_benchmark_finds_overlap_and_notices_when_there_is_none() -> None:
    points, parts = buckets.points_of(4, (100, 0.5)), buckets.formula(4)
    results = buckets.results_of(4, points, parts)
    assert missed(results) == []
    assert points[1][1] < points[0][1]
    one_bucket = buckets.results_of(4, points[:1], parts)
    assert missed(one_bucket) == ["no_overlap_over_optimum"]
    wrong = buckets.results_of(4, points, buckets.formula(5))
    assert missed(wrong) == ["one_bucket_rel_err"]
