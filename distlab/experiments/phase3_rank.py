"""What each rank does in the walkthrough of phase 3; `unit` is the learner's module.

Scenarios as the autograder's: `(context, unit, **values) -> plain data`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm import Call, Comm, TorchComm, Wrapper, leave_default_group
from distlab.grading.checks.topology_nodes import levels_on
from distlab.runner import RankContext
from distlab.sim import AlphaBeta
from distlab.sim import torch as sim_torch
from distlab.sim.plans.schedules import ring_all_reduce

LAYERS, LAYER_NUMBERS = 50, 5_000  # 50 gradients of 20 kB: a megabyte
BACKWARD_S = 10e-3  # of all of them
LINK = AlphaBeta(alpha_s=1e-6, bytes_per_s=12.5e9)
FLOPS_PER_S = 2e11


class Watched(Wrapper):
    """A comm that notes what is in a tensor before each call."""

    def __init__(self, inner: Comm, tensor: Tensor) -> None:
        super().__init__(inner)
        self._tensor = tensor
        self.seen: list[list[int]] = []

    def look(self) -> None:
        """Note what is in it now."""
        self.seen.append(self._tensor.tolist())

    def _around(self, call: Call, proceed: Callable[[], Any]) -> Any:
        self.look()
        return proceed()


def ring_step_by_step(
    context: RankContext, unit: ModuleType, *, seed: int = 0
) -> list[list[int]]:
    """One number per chunk, before each step and at the end: bit r is rank r's part."""
    tensor = torch.full((context.world_size,), 1 << context.rank)
    watched = Watched(context.comm, tensor)
    unit.all_reduce(watched, tensor)
    watched.look()
    return watched.seen


def one_sum(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    function: str,
    num_bytes: int,
) -> dict[str, Any]:
    """An all-reduce of so many bytes: is the sum right, and what did this rank send?"""
    n = context.world_size
    tensor = torch.full((num_bytes // 4,), 1.0 + context.rank)
    getattr(unit, function)(context.comm, tensor)
    return {
        "is_right": bool((tensor == n * (n + 1) / 2).all()),
        "sent_bytes": context.traffic.sent_bytes,
        "messages": context.traffic.messages,
    }


def one_sum_on_nodes(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    node_size: int,
    num_bytes: int,
) -> dict[str, Any]:
    """The same in two levels, with an inter-node ring."""
    n, k = context.world_size, node_size
    tensor = torch.full((num_bytes // 4,), 1.0 + context.rank)
    nodes = [range(start, start + k) for start in range(0, n, k)]
    levels = levels_on(context.comm, unit, nodes)
    unit.hierarchical(levels, tensor, ring_all_reduce)
    return {"is_right": bool((tensor == n * (n + 1) / 2).all())}


def estimates(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    n: int,
    sizes: tuple[int, ...],
    link: tuple[float, float],
) -> list[dict[str, float]]:
    """What estimate_time returns for each size."""
    return [dict(unit.estimate_time(n, size, unit.Link(*link))) for size in sizes]


def choices(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    counts: tuple[int, ...],
    sizes: tuple[int, ...],
    node_size: int,
    intra_node: tuple[float, float],
    inter_node: tuple[float, float],
    uplink: float,
) -> list[list[str]]:
    """What choose returns: a row per number of ranks, a column per size."""
    links = unit.Link(*intra_node), unit.Link(*inter_node)
    found = []
    for n in counts:
        cluster = unit.Cluster(n, min(node_size, n), *links, uplink)
        found.append([unit.choose(cluster, size) for size in sizes])
    return found


# ── a backward() of known length ────────────────────────────────────────────────────


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, sleep: Callable[[float], None]
    ) -> Tensor:
        ctx.sleep, ctx.size = sleep, weight.shape
        return x + weight.mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.sleep(BACKWARD_S / LAYERS)
        return gradient, gradient.sum().expand(ctx.size).contiguous(), None


class Slow(nn.Module):
    """A layer whose backward takes its time."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(LAYER_NUMBERS))
        self._sleep = sleep

    def forward(self, x: Tensor) -> Tensor:
        """Adds a number to x."""
        made: Tensor = _Slow.apply(x, self.weight, self._sleep)  # type: ignore[no-untyped-call]
        return made


def one_backward(
    context: RankContext, unit: ModuleType, *, seed: int = 0, bucket_mib: float
) -> dict[str, Any]:
    """When each bucket left and how large it was, and when backward() was over."""
    comm = context.comm
    launches: list[tuple[float, int]] = []
    start_s = 0.0

    def hook(group: Comm, flat: Tensor) -> Any:
        launches.append((group.time() - start_s, flat.nbytes))
        return unit.start_all_reduce(group, flat)

    layers = [Slow(context.clock.sleep) for _ in range(LAYERS)]
    ddp = unit.DistributedDataParallel(
        nn.Sequential(*layers), comm, bucket_size_mib=bucket_mib, comm_hook=hook
    )
    outputs = ddp(torch.ones(1)).sum()
    comm.barrier()
    start_s = comm.time()
    outputs.backward()
    return {"launches": launches, "ended_s": comm.time() - start_s}


# ── beside torch's own ──────────────────────────────────────────────────────────────


def beside_torch(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    n: int,
    caps_mib: tuple[float, ...],
) -> dict[str, list[float]]:
    """Virtual seconds of a training step on n ranks: the learner's DDP, and torch's.

    Both run in a simulated torch.distributed, where computing takes time as well.
    """
    found: dict[str, list[float]] = {"yours": [], "torch's": []}
    for cap_mib in caps_mib:
        for name, took_s in found.items():

            def program(whose: str = name, cap_mib: float = cap_mib) -> float:
                return _third_step_s(unit, whose, cap_mib)

            done = sim_torch.run(program, n, net=LINK, flops_per_s=FLOPS_PER_S)
            done.require_finished()
            took_s.append(max(done.values))
    return found


def _third_step_s(unit: ModuleType, whose: str, cap_mib: float) -> float:
    """On a simulated rank; torch's DDP lays out its buckets anew after the first."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
    ddp: nn.Module
    if whose == "yours":
        comm = TorchComm.from_default()
        ddp = unit.DistributedDataParallel(model, comm, bucket_size_mib=cap_mib)
    else:
        ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap_mib)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, took_s = torch.randn(32, 256), 0.0
    for _ in range(3):
        start_s = sim_torch.now_s()
        optimizer.zero_grad()
        ddp(inputs).square().mean().backward()
        optimizer.step()
        took_s = sim_torch.now_s() - start_s
    return took_s


def real_steps(
    context: RankContext, unit: ModuleType, *, seed: int = 0, meeting: str
) -> list[float]:
    """By step: the wall time of one with the learner's DDP by that of torch's."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=context.rank,
        world_size=context.world_size,
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
    twin = copy.deepcopy(model)
    ddps = (
        unit.DistributedDataParallel(
            model, TorchComm.from_default(), bucket_size_mib=4
        ),
        nn.parallel.DistributedDataParallel(twin, bucket_cap_mb=4),
    )
    inputs, ratios = torch.randn(64, 512), []
    for _ in range(12):
        took_s = []
        for ddp in ddps:
            started = time.perf_counter()
            ddp.zero_grad()
            ddp(inputs).square().mean().backward()
            took_s.append(time.perf_counter() - started)
        ratios.append(took_s[0] / took_s[1])
    leave_default_group()
    return ratios[2:]


# ── bytes that a rank holds ─────────────────────────────────────────────────────────


def held_bytes(
    context: RankContext, unit: ModuleType, *, seed: int = 0, stage: int
) -> dict[str, int]:
    """Weights, gradients and Adam's state that this rank has after a step's backward.

    A stage's own formula, for the same model, is beside them.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    size = sum(p.numel() for p in model.parameters())
    n = context.world_size
    group = {"params": list(model.parameters()), "lr": 1e-3}
    sharded = unit.STAGES[stage](context.comm, model, [group], torch.optim.AdamW)
    for _ in range(2):  # the first step makes the state
        sharded.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        weights = _nbytes([*model.parameters(), *(b.shard for b in sharded.buckets)])
        gradients = _nbytes(p.grad for p in model.parameters())
        gradients += _nbytes(b.shard.grad for b in sharded.buckets)
        sharded.reduce_gradients()
        sharded.step()
    state = _nbytes(
        value
        for entry in sharded.optimizer.state.values()
        for value in entry.values()
        if isinstance(value, Tensor) and value.dim()
    )
    return {
        "weights": weights,
        "gradients": gradients,
        "state": state,
        "formula": unit.bytes_per_rank(size, n, stage),
    }


def _nbytes(tensors: Any) -> int:
    """Bytes of memory behind these tensors, each counted once."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in tensors
        if t is not None
    }
    return sum(storages.values())
