"""The hooks of unit gradient_compression in the unit's DDP, and the given ones."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.parallel import DistributedDataParallel

from distlab.comm import ByteMeter, Comm, Traffic, Work, leave_default_group
from distlab.curriculum import load
from distlab.given import gradient_compression as compression
from distlab.grading.checks.distributed_data_parallel import watch
from distlab.grading.checks.distributed_data_parallel.hooks import LAYERS_MIB
from distlab.grading.checks.gradient_compression.hooked import make_buckets
from distlab.grading.kit.flat import flat
from distlab.grading.kit.torchrun_env import keep_wrappers, like_torchrun
from distlab.runner import Cluster, RankContext
from distlab.walkthroughs.compression import gaps, low_rank_errors

SEED, STEPS, SIZE = 3, 4, 40


def hook_of(name: str) -> Any:
    unit = load("gradient_compression", "reference")
    return {
        "fp16": lambda: compression.fp16,
        "bf16": lambda: compression.bf16,
        "sign": compression.Sign,
        "top_k": lambda: unit.TopK(0.25),
        "int8": unit.Int8,
        "powersgd": lambda: unit.PowerSGD(2),
        "full": lambda: unit.PowerSGD(100),
        "all": lambda: unit.TopK(1.0),
        "waits": lambda: waits_at_once,
    }[name]()


def waits_at_once(comm: Comm, bucket: Any) -> Work:
    """What no hook may do: wait before it returns."""
    work: Work = hook_of("int8")(comm, bucket)
    work.wait()
    return work


def in_ddp(context: RankContext, name: str) -> dict[str, Any]:
    """Some steps of the unit's DDP: the gradients of the last, and blocking calls."""
    ddp_unit = load("distributed_data_parallel", "reference")
    model, events = watch.Chain(SEED), list[Any]()
    watch.watch_gradients(model, events)
    comm = watch.EventComm(context.comm, events)
    ddp = ddp_unit.DistributedDataParallel(
        model, comm, bucket_size_mib=LAYERS_MIB, comm_hook=hook_of(name)
    )
    for step in range(1, STEPS + 1):  # a gradient of step 0 is not finite
        model.zero_grad()
        loss = watch.loss_of(ddp(watch.make_inputs(SEED, step, context.rank)))
        events.clear()
        loss.backward()
    last = max(p for p, e in enumerate(events) if e[0] == "gradient")
    waits = [e for e in events[:last] if e[0] == "wait" or (e[0] == "call" and e[3])]
    found = {k: g for k, g in watch.gradients(model).items() if g is not None}
    return {"gradient": flat(found), "waits": waits}


@pytest.mark.parametrize(
    "name", ["fp16", "bf16", "sign", "top_k", "int8", "all", "powersgd", "full"]
)
@pytest.mark.parametrize("n", [2, 3])
def test_nobody_waits_in_backward_and_all_ranks_have_the_same(
    cluster: Cluster, name: str, n: int
) -> None:
    values = cluster.run(in_ddp, n, name).require_finished().values
    for value in values:
        assert value["waits"] == []
        assert torch.equal(value["gradient"], values[0]["gradient"])
    if name in ("all", "full"):
        own = watch.chain_gradients(SEED, STEPS, n)
        mean = flat(watch.mean_of(own))
        assert torch.allclose(values[0]["gradient"], mean, rtol=0, atol=1e-2)


def test_a_hook_that_waits_in_backward_is_seen(cluster: Cluster) -> None:
    for value in cluster.run(in_ddp, 2, "waits").require_finished().values:
        assert value["waits"] != []


def one_bucket(context: RankContext, name: str, size: int) -> dict[str, Any]:
    """The sum of what all steps gave, and bytes of a step over a dense one's."""
    traffic, hook = Traffic(), hook_of(name)
    comm = ByteMeter(context.comm, traffic)
    flat = torch.zeros(size)
    bucket = type(make_buckets(flat.device, flat.dtype)[0])([flat.clone()], flat)
    total, given = torch.zeros(size), torch.zeros(size)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + context.rank)
        own = torch.randn(size, generator=generator)
        given += own
        bucket.flat.copy_(own)
        work = hook(comm, bucket)
        work.wait()
        work.wait()
        total += bucket.flat
    n = context.world_size
    dense = 2 * (n - 1) / n * 4 * size * STEPS
    return {"total": total, "given": given, "share": traffic.sent_bytes / dense}


BYTES = [
    ("fp16", 0.5, 0.5),
    ("bf16", 0.5, 0.5),
    ("sign", 0.031, 0.033),
    ("int8", 0.25, 0.26),
]


@pytest.mark.parametrize(("name", "least", "most"), BYTES)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_given_hooks_send_so_many_bytes(
    cluster: Cluster, name: str, least: float, most: float, n: int
) -> None:
    run = cluster.run(one_bucket, n, name, 48_000).require_finished()
    for value in run.values:
        assert least <= value["share"] <= most


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_half_precision_rounds_the_sum(cluster: Cluster, name: str) -> None:
    run = cluster.run(one_bucket, 3, name, SIZE).require_finished()
    exact: Tensor = torch.stack([value["given"] for value in run.values]).sum(0)
    for value in run.values:
        assert torch.allclose(value["total"], exact, rtol=0, atol=0.25)


def overflows(context: RankContext, names: tuple[str, ...]) -> dict[str, list[bool]]:
    """By hook and value, whether each step's gradients are finite: step 1 has one."""
    ddp_unit = load("distributed_data_parallel", "reference")
    found = {}
    for name in names:
        for value in (torch.inf, torch.nan):
            torch.manual_seed(SEED)
            model = torch.nn.Linear(4, 4)
            ddp = ddp_unit.DistributedDataParallel(
                model, context.comm, comm_hook=hook_of(name)
            )
            last = context.rank == context.world_size - 1
            found[f"{name} {value}"] = seen = list[bool]()
            for step in range(STEPS):
                model.zero_grad()
                is_bad = step == 1 and last
                (ddp(torch.ones(2, 4)).sum() * (value if is_bad else 1.0)).backward()
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                seen.append(all(bool(g.isfinite().all()) for g in grads))
    return found


def test_an_overflow_is_seen_by_all_ranks_in_its_own_step_only(
    cluster: Cluster,
) -> None:
    names = ("fp16", "bf16", "sign", "top_k", "int8", "powersgd")
    run = cluster.run(overflows, 3, names).require_finished()
    for found in run.values:
        for name, seen in found.items():
            assert seen == [True, False, True, True], name


def resumed(context: RankContext, names: list[str]) -> dict[str, list[Tensor]]:
    """The gradients of step 2: of hooks that had step 1, and of resumed ones."""
    ddp_unit = load("distributed_data_parallel", "reference")

    def gradient(ddp: Any, step: int) -> Tensor:
        torch.manual_seed(10 * step + context.rank)
        model = ddp.module
        model.zero_grad()
        (ddp(torch.randn(4, 20)).square().sum() + model.empty.sum()).backward()
        return torch.as_tensor(model.weight.grad).clone()

    found = {}
    for name in names:
        torch.manual_seed(SEED)
        model, hook, other = torch.nn.Linear(20, 3), hook_of(name), hook_of(name)
        model.register_parameter("empty", torch.nn.Parameter(torch.ones(0, 2)))
        copy = deepcopy(model)
        wrap = partial(ddp_unit.DistributedDataParallel, comm=context.comm)
        ddp, continued = wrap(model, comm_hook=hook), wrap(copy, comm_hook=other)
        gradient(ddp, 1)
        for kind in ("residuals", "factors"):
            if hasattr(hook, kind):
                state = deepcopy(getattr(hook, kind).state_dict(model))
                getattr(other, kind).load_state_dict(copy, state)
        found[name] = [gradient(ddp, 2), gradient(continued, 2)]
    return found


def test_a_hook_with_the_state_of_another_continues_it(cluster: Cluster) -> None:
    names = ["sign", "top_k", "int8", "powersgd"]
    for found in cluster.run(resumed, 3, names).require_finished().values:
        for name, (unbroken, continued) in found.items():
            assert torch.equal(unbroken, continued), name


def test_sums_of_chunks_are_for_as_many_ranks_only() -> None:
    model = torch.nn.Linear(2, 2)
    bucket = compression.FlatBucket([model.weight], torch.zeros(4))
    kept, like = compression.ChunkResiduals(), torch.ones(4)
    kept.keep_sums(bucket, like, 2)
    other = compression.ChunkResiduals()
    other.load_state_dict(model, kept.state_dict(model))
    assert torch.equal(other.of_sums(bucket, like, 2), like)
    assert not other.of_sums(bucket, like, 3).any()


def halves(context: RankContext) -> list[float]:
    """The sum of 40,000 on each rank, by the fp16 hook, in units of n."""
    bucket = compression.FlatBucket([torch.zeros(3)], torch.full((3,), 40000.0))
    compression.fp16(context.comm, bucket).wait()
    return (bucket.flat / context.world_size).tolist()


def test_a_sum_in_half_precision_may_be_above_its_range(cluster: Cluster) -> None:
    for found in cluster.run(halves, 2).require_finished().values:
        assert found == [40000.0] * 3


def test_int8_refuses_more_ranks_than_it_can_add_up() -> None:
    class Crowd:
        world_size = 128

    bucket = compression.FlatBucket([torch.zeros(3)], torch.zeros(3))
    with pytest.raises(ValueError, match=r"127 .* 128"):
        hook_of("int8")(Crowd(), bucket)


def test_signs_come_back_from_their_bits() -> None:
    rows = torch.tensor([[1.0, -2, 0, -4, 5, 6, -7, 8], [-1.0] * 8])
    bits = compression.to_bits(rows)
    assert bits.tolist() == [[0b10110101], [0]]
    signs = [[1, -1, 1, -1, 1, 1, -1, 1], [-1] * 8]
    assert compression.from_bits(bits, torch.float32).tolist() == signs


def test_error_feedback_is_what_the_guide_says() -> None:
    with_it, without = gaps("reference", 0.1)
    assert round(with_it, 2) == 0.59
    assert round(without) == 104


def test_the_mean_of_low_rank_steps_is_as_close_as_the_guide_says() -> None:
    assert [round(percent) for percent in low_rank_errors("reference", 4)] == [47, 6]


def beside_torchs(context: RankContext) -> list[float]:
    """Differences of the gradients in each step, from the same first Q."""
    like_torchrun(context, 20)
    keep_wrappers()
    dist.init_process_group("gloo")
    rank, n = 2, context.world_size
    model = torch.nn.Linear(12, 9, bias=False).double()
    hook, flat = hook_of("powersgd"), torch.zeros(12 * 9, dtype=torch.float64)
    weight = torch.nn.Parameter(torch.zeros(9, 12, dtype=torch.float64))
    bucket = type(make_buckets(flat.device, flat.dtype)[0])([weight], flat)
    state = torchs.PowerSGDState(
        None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=2,
        min_compression_rate=1,
        orthogonalization_epsilon=0,
    )
    state.q_memory_dict[0] = compression.first_factor(weight.detach(), rank).reshape(-1)
    state.p_memory_dict[0] = torch.zeros(9 * rank, dtype=torch.float64)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, torchs.powerSGD_hook)
    found = []
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + context.rank)
        inputs = torch.randn(20, 12, generator=generator, dtype=torch.float64)
        targets = torch.randn(20, 9, generator=generator, dtype=torch.float64)
        own = (targets.T @ inputs).reshape(-1)
        ddp.zero_grad()
        (ddp(inputs) * targets).sum().backward()
        if step < 2:  # torch begins with two dense steps
            continue
        flat.copy_(own)
        hook(context.comm, bucket).wait()
        theirs = model.weight.grad
        assert theirs is not None
        found.append(float((flat / n - theirs.reshape(-1)).abs().max()))
    leave_default_group()
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_powersgd_is_that_of_torch(cluster: Cluster, n: int) -> None:
    for gaps_of_steps in cluster.run(beside_torchs, n).require_finished().values:
        assert len(gaps_of_steps) == 4
        assert max(gaps_of_steps) < 1e-9
