"""`distlab.distributed`: what it trains is what a single process would train."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import distlab.distributed as dist
from distlab.comm import SUM, Comm, ReduceOp, Work
from distlab.distributed.data_parallel import wrappers
from distlab.runner import Cluster, RankContext
from tests.workbench.distributed_ranks import begin, ranks

# ── data parallelism ────────────────────────────────────────────────────────────────


class Counting:
    """A communicator that counts the all_reduces of floating-point tensors."""

    def __init__(self, comm: Comm) -> None:
        self._comm, self.sizes = comm, list[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp = SUM,
        async_op: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> Work | None:
        if tensor.is_floating_point():
            self.sizes.append(tensor.nbytes)
        return self._comm.all_reduce(tensor, op, async_op, timeout_s=timeout_s)


def sends_buckets(context: RankContext) -> dict[str, list[int]]:
    begin(context)
    found = {}
    for name, size in (
        ("bucket_size_mb", 0.5),
        ("bucket_size_mib", 0.5),
        ("bucket_size_mb", 8),
        ("bucket_cap_mb", 0.5),
    ):
        comm: Any = Counting(dist.default_comm())
        layers = [nn.Linear(256, 256, bias=False) for _ in range(4)]  # 256 KiB each
        model = dist.DistributedDataParallel(
            nn.Sequential(*layers), comm, **{name: size}
        )
        model(torch.ones(1, 256)).sum().backward()
        assert model.num_buckets == len(comm.sizes)
        found[f"{name}={size}"] = [size // 1024 for size in comm.sizes]
    return found


def test_bucket_size_mb_sets_the_messages(cluster: Cluster) -> None:
    for found in ranks(cluster, sends_buckets, 2):
        assert found == {
            "bucket_size_mb=0.5": [512, 512],
            "bucket_size_mib=0.5": [512, 512],
            "bucket_size_mb=8": [1024],
            "bucket_cap_mb=0.5": [512, 512],
        }


class Gain(nn.Module):
    """A float16 weight whose gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def averages_halves(context: RankContext) -> list[float]:
    rank, _ = begin(context)
    found = []
    for value in (40000.0, 2.0**-24 * (1 + 2 * rank)):  # a sum too large; the least
        model = dist.DistributedDataParallel(Gain())
        model(torch.tensor([value], dtype=torch.float16)).backward()
        assert model.module.weight.grad is not None
        found.append(model.module.weight.grad.item())
    return found


def test_gradients_of_float16_are_summed_in_float32(cluster: Cluster) -> None:
    for found in ranks(cluster, averages_halves, 2):
        assert found == [40000.0, 2 * 2.0**-24]


class Branches(nn.Module):
    """Uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x: Tensor, which: int) -> Tensor:
        return (self.odd if which % 2 else self.even)(x)


def leaves_parameters_out(context: RankContext) -> dict[bool, str]:
    rank, _ = begin(context)
    found = {}
    for find in (False, True):
        model = dist.DistributedDataParallel(Branches(), find_unused_parameters=find)
        try:
            model(torch.ones(1, 2), rank).sum().backward()
        except RuntimeError as error:
            found[find] = str(error)
        else:
            gradients = [p.grad.tolist() for p in model.parameters()]
            found[find] = str(gradients)
        dist.barrier()
    return found


def test_find_unused_parameters(cluster: Cluster) -> None:
    for found in ranks(cluster, leaves_parameters_out, 2):
        assert "set find_unused_parameters=True" in found[False]
        assert found[True] == str([[[0.5, 0.5]], [0.5], [[0.5, 0.5]], [0.5]])


def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    inputs = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()


STEPS = (3, 1, 2)  # batches of each rank


def runs_out(context: RankContext, how: str) -> list[Tensor]:
    rank, _ = begin(context)
    model = dist.DistributedDataParallel(network(rank), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def dummy() -> Tensor:
        if how == "zero_loss":
            return model.zero_loss()
        zeros = [parameter.sum() * 0 for parameter in model.parameters()]
        return torch.stack(zeros).sum()

    for step in range(STEPS[rank] if how == "join" else max(STEPS)):
        optimizer.zero_grad()
        if step < STEPS[rank]:
            inputs, targets = data(rank, step)
            mse_loss(model(inputs), targets).backward()
        else:
            dummy().backward()
        optimizer.step()
    if how == "join":
        for _ in model.join():
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("how", ["join", "zero_loss", "zero times the parameters"])
def test_a_rank_without_batches_does_not_skew_the_mean(
    cluster: Cluster, how: str
) -> None:
    alone = network()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(max(STEPS)):
        optimizer.zero_grad()
        batches = [data(rank, step) for rank in range(3) if step < STEPS[rank]]
        for inputs, targets in batches:
            (mse_loss(alone(inputs), targets) / len(batches)).backward()
        optimizer.step()
    for weights in ranks(cluster, runs_out, 3, how):
        for actual, expected in zip(weights, alone.parameters(), strict=True):
            assert torch.allclose(actual, expected, rtol=1e-12, atol=1e-14)


def bypasses_the_wrapper(context: RankContext) -> list[str]:
    begin(context)
    model = dist.DistributedDataParallel(network(), find_unused_parameters=True)
    said = []
    try:
        model.module(data(0, 0)[0]).sum().backward()
    except RuntimeError as error:
        said.append(str(error))
    plain = dist.DistributedDataParallel(network())
    for call in (plain.zero_loss, lambda: next(plain.join())):
        try:
            call()
        except ValueError as error:
            said.append(str(error))
    for given in (
        {"bucket_size_mb": 1, "bucket_size_mib": 1},
        {"bucket_cap_mb": 1, "bucket_size_mib": 1},
        {"device_ids": [0]},
        {"device_ids": []},
    ):
        try:
            dist.DistributedDataParallel(network(), **given)
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_the_wrapper_refuses(cluster: Cluster) -> None:
    (said,) = ranks(cluster, bypasses_the_wrapper, 1)
    assert "wrapper" in said[0]
    assert {"zero_loss()", "find_unused_parameters=True"} <= set(said[1].split())
    assert {"join()", "find_unused_parameters=True"} <= set(said[2].split())
    assert re.match(r"bucket_size_mb\b.*\bbucket_size_mib\b", said[3])
    assert re.match(r"bucket_cap_mb\b.*\bbucket_size_mib\b", said[4])
    assert re.match(r"device_ids is \[0\].* cpu\b", said[5])
    assert re.match(r"device_ids is \[\].* cpu\b", said[6])


def syncs_late(context: RankContext, find: bool) -> dict[str, Any]:
    rank, n = begin(context)
    comm: Any = Counting(dist.default_comm())
    models = [
        dist.DistributedDataParallel(network(k), comm, find_unused_parameters=find)
        for k in range(2)
    ]
    assert wrappers() == models
    with dist.no_sync():
        for step in range(2):
            for model in models:
                model(data(rank, step)[0]).sum().backward()
    sent_inside = len(comm.sizes)
    dist.sync_gradients()
    sent, first = len(comm.sizes), [p.grad.clone() for p in models[0].parameters()]
    dist.sync_gradients()
    sent_again = len(comm.sizes)
    models[0].zero_grad()
    models[0](data(rank, 0)[0]).sum().backward()
    after_step = len(comm.sizes)
    dist.sync_gradients()
    alone = network(0)
    for r in range(n):
        for step in range(2):
            (alone(data(r, step)[0]).sum() / n).backward()
    pairs = zip(first, alone.parameters(), strict=True)
    return {
        "counts": (sent_inside, sent, sent_again, after_step, len(comm.sizes)),
        "is_mean": all(torch.allclose(own, p.grad) for own, p in pairs),
    }


@pytest.mark.parametrize("find", [False, True])
def test_sync_gradients_after_no_sync_and_only_once(
    cluster: Cluster, find: bool
) -> None:
    for found in ranks(cluster, syncs_late, 3, find):
        assert found == {"counts": (0, 2, 2, 3, 3), "is_mean": True}


def copies(context: RankContext) -> bool:
    rank, _ = begin(context)
    model = dist.DistributedDataParallel(network(rank))
    twin = copy.deepcopy(model)
    twin(data(rank, 0)[0]).sum().backward()
    assert list(twin.state_dict()) == [
        f"module.{key}" for key in network().state_dict()
    ]
    assert all(p.grad is None for p in model.parameters())
    total = sum(p.grad.abs().sum() for p in twin.parameters())
    return len({float(t) for t in dist.all_gather(total)}) == 1


def test_a_copy_synchronizes_too(cluster: Cluster) -> None:
    assert ranks(cluster, copies, 2) == [True, True]
