"""The hooks of unit gradient_compression in torch's DDP, through the given adapter."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distlab.comm import TorchComm, leave_default_group
from distlab.given.gradient_compression import FlatBucket, torch_hook
from distlab.grading.kit.torchrun_env import keep_wrappers, like_torchrun
from distlab.runner import Cluster, Limits, RankContext
from tests.workbench.test_gradient_compression import hook_of

STEPS, WIDTH = 4, 8
BUCKET_MIB = 100 * 4 / 2**20
NAMES = ["fp16", "bf16", "sign", "top_k", "int8", "powersgd"]
EXACT = ["all", "full"]
LIMITS = Limits(seconds=120)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """With what the constructor of torch's DDP imports, which takes seconds."""
    with Cluster(preload=("torch._dynamo",)) as ranks:
        yield ranks


def started(context: RankContext) -> TorchComm:
    like_torchrun(context, 20)
    keep_wrappers()
    dist.init_process_group("gloo")
    return TorchComm.from_default()


def model_of() -> nn.Module:
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def inputs_of(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, WIDTH, generator=generator)


def in_torchs_ddp(context: RankContext, name: str) -> dict[str, Any]:
    """Some steps: .grad, the mean of the ranks' own, and what the hook gives alone."""
    comm = started(context)
    module, alone = model_of(), hook_of(name)
    made, calls = torch_hook(hook_of(name)), list[Any]()

    def recorded(state, bucket):  # type: ignore[no-untyped-def]
        calls.append((bucket.parameters(), bucket.buffer().clone()))
        return made(state, bucket)

    ddp = DistributedDataParallel(module, bucket_cap_mb=BUCKET_MIB)
    ddp.register_comm_hook(None, recorded)
    gaps, counts = [], []
    for step in range(STEPS):
        calls.clear()
        module.zero_grad()
        ddp(inputs_of(step, context.rank)).square().sum().backward()
        counts.append(len(calls))
        for parameters, flat in calls:
            found = torch.cat([p.grad.flatten() for p in parameters])
            own = flat.clone()
            alone(comm, FlatBucket(parameters, flat)).wait()
            comm.all_reduce(own)
            mean = own / context.world_size
            gaps.append(
                (
                    float((found - flat / context.world_size).abs().max()),
                    float((found - mean).abs().max()),
                )
            )
    gradient = torch.cat([p.grad.flatten() for p in module.parameters()])
    leave_default_group()
    return {"gaps": gaps, "counts": counts, "gradient": gradient}


@pytest.mark.parametrize(
    "name",
    [*NAMES[:1], *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES[1:] + EXACT)],
)
def test_a_hook_gives_in_torchs_ddp_what_it_gives_alone(
    cluster: Cluster, name: str
) -> None:
    run = cluster.run(in_torchs_ddp, 2, name, limits=LIMITS)
    values = run.require_finished().values
    for value in values:
        assert value["counts"][0] == 1  # DDP's first step
        assert min(value["counts"][1:]) > 1
        assert max(alone for alone, _ in value["gaps"]) == 0
        assert torch.equal(value["gradient"], values[0]["gradient"])
    most = max(mean for _, mean in values[0]["gaps"])
    assert most < 1e-3 if name in EXACT else most > 1e-6


def apart(context: RankContext, name: str, patience_s: float) -> bool:
    """Whether rank 0's hook returns for all buckets while rank 1 has sent nothing.

    Rank 1 goes backward only then, or when it has waited for so long.
    """
    comm, module = started(context), model_of()
    hook = torch_hook(hook_of(name), comm)
    store, calls = c10d._get_default_store(), list[int]()
    is_last = False

    def counted(state, bucket):  # type: ignore[no-untyped-def]
        future = hook(state, bucket)
        calls.append(bucket.index())
        if is_last and context.rank == 0 and bucket.is_last():
            store.set("all buckets", "returned")
        return future

    ddp = DistributedDataParallel(module, bucket_cap_mb=BUCKET_MIB)
    ddp.register_comm_hook(None, counted)
    in_time = True
    for step in range(2):
        calls.clear()
        is_last = step == 1
        loss = ddp(inputs_of(step, context.rank)).square().sum()
        if is_last and context.rank == 1:
            try:
                store.wait(["all buckets"], timedelta(seconds=patience_s))
            except dist.DistStoreError:
                in_time = False
        loss.backward()
    assert len(calls) > 1
    leave_default_group()
    return in_time


@pytest.mark.parametrize("name", NAMES)
def test_no_hook_waits_in_backward_of_torchs_ddp(cluster: Cluster, name: str) -> None:
    run = cluster.run(apart, 2, name, 30.0, limits=LIMITS).require_finished()
    assert run.values == [True, True]


def test_a_hook_that_waits_is_seen(cluster: Cluster) -> None:
    run = cluster.run(apart, 2, "waits", 1.0, limits=LIMITS).require_finished()
    assert run.values == [True, False]
