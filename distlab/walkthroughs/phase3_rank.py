"""Run on each rank for the lab of phase 3; `unit` is the learner's module.

Scenarios have the autograder's form, `(context, unit, **values) -> plain data`.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm import Comm, TorchComm, leave_default_group
from distlab.grading.checks.topology.nodes import levels_on
from distlab.runner import RankContext
from distlab.sim import AlphaBeta
from distlab.sim import torch as sim_torch
from distlab.sim.calibration.charge import run_charged
from distlab.sim.plans.schedules import ring_all_reduce
from distlab.sim.torch.script import Script, run_script
from distlab.simulated.script_facts import facts_of

LAYERS, LAYER_NUMBERS = 50, 5_000  # 50 gradients of 20 kB: a megabyte
BACKWARD_S = 10e-3  # of all of them
ROUNDS, CALLS = 20, 5
LINK = AlphaBeta(alpha_s=1e-6, bytes_per_s=12.5e9)
FLOPS_PER_S = 2e11


def one_sum(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    function: str,
    num_bytes: int,
) -> bool:
    """Run an all-reduce of this size, and return whether the sum is correct."""
    n = context.world_size
    tensor = torch.full((num_bytes // 4,), 1.0 + context.rank)
    getattr(unit, function)(context.comm, tensor)
    return bool((tensor == n * (n + 1) / 2).all())


def one_sum_on_nodes(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    node_size: int,
    num_bytes: int,
) -> bool:
    """Run the same all-reduce in two levels, with an inter-node ring."""
    n, k = context.world_size, node_size
    tensor = torch.full((num_bytes // 4,), 1.0 + context.rank)
    nodes = [range(start, start + k) for start in range(0, n, k)]
    levels = levels_on(context.comm, unit, nodes)
    unit.hierarchical(levels, tensor, ring_all_reduce)
    return bool((tensor == n * (n + 1) / 2).all())


def estimates(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    n: int,
    sizes: tuple[int, ...],
    link: tuple[float, float],
) -> list[dict[str, float]]:
    """Return the result of estimate_time for each size."""
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
    """Return the result of choose, with a row per n and a column per size."""
    links = unit.Link(*intra_node), unit.Link(*inter_node)
    rows = []
    for n in counts:
        cluster = unit.Cluster(n, min(node_size, n), *links, uplink)
        rows.append([unit.choose(cluster, size) for size in sizes])
    return rows


# ── additions that take time ────────────────────────────────────────────────────────


def segmented(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    n: int,
    num_bytes: int,
    segment_bytes: tuple[int, ...],
    alpha_s: float,
    bytes_per_s: float,
) -> list[dict[str, float]]:
    """Return virtual seconds by segment size, if adding is as fast as sending."""
    options: dict[str, Any] = {
        "operation_s": lambda operand_bytes: operand_bytes / bytes_per_s,
        "net": AlphaBeta(alpha_s=alpha_s, bytes_per_s=bytes_per_s),
        "journal": False,
        "trace": False,
    }

    def took_s(sum_up: Callable[[Comm, Tensor], None]) -> float:
        done = run_charged(_charged_sum_s, n, sum_up, num_bytes, **options)
        done.require_finished()
        return float(max(done.values))

    ring_s = took_s(unit.all_reduce)
    return [
        {
            "pipelined ring": took_s(
                partial(unit.pipelined_all_reduce, segment_bytes=size)
            ),
            "ring of 3.3": ring_s,
        }
        for size in segment_bytes
    ]


def _charged_sum_s(
    context: RankContext, sum_up: Callable[[Comm, Tensor], None], num_bytes: int
) -> float:
    comm, tensor = context.comm, torch.ones(num_bytes // 4)
    start_s = comm.time()
    sum_up(comm, tensor)
    return comm.time() - start_s


# ── on this machine's clock ─────────────────────────────────────────────────────────


def real_times(
    context: RankContext, unit: ModuleType, *, seed: int = 0, sizes: tuple[int, ...]
) -> dict[str, list[float]]:
    """Return the wall seconds of an exchange of ranks 0 and 1 and of the ring, by size.

    We take the fastest of ROUNDS loops, because everything slower is a disturbance.
    Each round measures both, so that the same disturbances affect both.
    """
    comm, peer = context.comm, 1 - context.rank

    def exchange(tensor: Tensor, recv_buffer: Tensor) -> None:
        if context.rank < 2:
            comm.sendrecv(tensor, peer, recv_buffer, peer)

    def ring(tensor: Tensor, _: Tensor) -> None:
        unit.all_reduce(comm, tensor)

    work = {"message": exchange, "ring": ring}
    fastest = {name: [float("inf")] * len(sizes) for name in work}
    for _ in range(ROUNDS):
        for row, num_bytes in enumerate(sizes):
            for name, do in work.items():
                took_s = _loop_s(do, num_bytes)
                fastest[name][row] = min(fastest[name][row], took_s)
    return fastest


def _loop_s(do: Callable[[Tensor, Tensor], None], num_bytes: int) -> float:
    tensor, recv_buffer = torch.zeros(2, num_bytes // 4)
    do(tensor, recv_buffer)  # warms up, and aligns the ranks
    started = time.perf_counter()
    for _ in range(CALLS):
        do(tensor, recv_buffer)
    return (time.perf_counter() - started) / CALLS


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
    """A layer whose backward pass takes a given time."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(LAYER_NUMBERS))
        self._sleep = sleep

    def forward(self, x: Tensor) -> Tensor:
        """Add a number to x."""
        made: Tensor = _Slow.apply(x, self.weight, self._sleep)  # type: ignore[no-untyped-call]
        return made


def one_backward(
    context: RankContext, unit: ModuleType, *, seed: int = 0, bucket_mib: float
) -> float:
    """Return the virtual seconds of a backward() with the learner's DDP."""
    comm = context.comm
    layers = [Slow(context.clock.sleep) for _ in range(LAYERS)]
    ddp = unit.DistributedDataParallel(
        nn.Sequential(*layers), comm, bucket_size_mib=bucket_mib
    )
    outputs = ddp(torch.ones(1)).sum()
    comm.barrier()
    start_s = comm.time()
    outputs.backward()
    return comm.time() - start_s


# ── beside torch's own ──────────────────────────────────────────────────────────────


def beside_torch(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    n: int,
    caps_mib: tuple[float, ...],
) -> dict[str, list[float]]:
    """Return the virtual seconds of a step with the learner's DDP and with torch's.

    Both run on n ranks in a simulated torch.distributed, where computing takes time as
    well.
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
    """Time the third step on a simulated rank, after torch's DDP set its buckets."""
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


def own_script(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    path: str,
    counts: tuple[int, ...],
    flops_per_s: float,
) -> dict[str, Any]:
    """Run a script on simulated ranks; it can import the learner's file by its name.

    Returns the figures of each run, and what rank 0 printed in the last one.
    """
    figures, printed = [], ""
    with patch.dict(sys.modules, {"distributed_data_parallel": unit}):
        for n in counts:
            done = run_script(Script(path), n, net=LINK, flops_per_s=flops_per_s)
            done.require_finished()
            facts = facts_of(done, n)
            per_rank = ("time_s", "exposed_s")
            reduced = [kind for kind in facts["collectives"] if "reduce" in kind["op"]]
            calls = sum(kind["calls"] for kind in reduced)
            figures.append({"calls": calls, **{key: facts[key] for key in per_rank}})
            printed = done.ranks[0].output
    return {"figures": figures, "printed": printed}


def real_steps(
    context: RankContext, unit: ModuleType, *, seed: int = 0, meeting: str
) -> list[float]:
    """Return for each step the ratio of the learner's wall time to that of torch's."""
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
