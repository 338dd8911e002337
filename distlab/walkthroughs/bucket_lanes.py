"""Show when buckets leave and arrive in one backward pass in virtual time.

We wrap a model of equal layers, whose backward pass takes a given time each, in the
unit's DistributedDataParallel or in torch's own, and run one backward pass on simulated
ranks. Its gradients are small, and the network is slower by the same factor. The times
are therefore those of a large model, but the run needs hardly any memory.

The setting is 10 ms of backward, 100 MB of gradients, 8 ranks, 20 µs of latency and
12.5 GB/s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm import Comm, Work
from distlab.curriculum import load
from distlab.runner import RankContext
from distlab.sim import AlphaBeta, run
from distlab.sim import torch as sim_torch
from distlab.sim.torch.rank import here

NUM_LAYERS = 50
PLAYED_LAYERS = 8
NUMBERS = 500  # of float32 in a layer
SCALE = 1e6 * 100 / (4 * NUMBERS * NUM_LAYERS)  # how much smaller it is than 100 MB
BACKWARD_S = 0.010
ALPHA_S, BYTES_PER_S = 20e-6, 12.5e9


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """Rank 0's step, in seconds from the beginning of backward()."""

    ready_s: tuple[float, ...]  # each layer's gradient
    left_s: tuple[float, ...]  # each bucket
    step_s: float  # when backward() returns


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, take_time: Callable[[], None]
    ) -> Tensor:
        ctx.take_time = take_time
        ctx.save_for_backward(weight)
        return x + 0 * weight.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.take_time()
        (weight,) = ctx.saved_tensors
        return gradient, torch.ones_like(weight), None


class _Layers(nn.Module):
    """Equal layers of `numbers` weights, whose backward takes `layer_s` each."""

    def __init__(
        self,
        sleep: Callable[[float], None],
        num_layers: int = NUM_LAYERS,
        numbers: int = NUMBERS,
        layer_s: float = BACKWARD_S / NUM_LAYERS,
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(numbers)) for _ in range(num_layers)
        )
        self._take_time = partial(sleep, layer_s)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = _Slow.apply(x, weight, self._take_time)  # type: ignore[no-untyped-call]
        return x


def play(context: RankContext, unit: Any, settings: dict[str, Any]) -> str:
    """Run a step of 8 layers with two layers per bucket, for `distlab sim 3.10`.

    The gradients have as many bytes as you ask for, and backward takes 0.1 ns per byte.
    """
    numbers = max(1, settings["num_bytes"] // 4 // PLAYED_LAYERS)
    layer_s = 4 * numbers * BACKWARD_S / 1e8
    model = _Layers(context.clock.sleep, PLAYED_LAYERS, numbers, layer_s)
    ddp = unit.DistributedDataParallel(
        model, context.comm, bucket_size_mib=2 * 4 * numbers / 2**20
    )
    ddp(torch.ones((), requires_grad=True)).backward()
    found = [w.grad for w in model.weights if w.grad is not None]
    return " ".join(f"{float(gradient.sum()):g}" for gradient in found)


def lanes(code: str, num_buckets: int, world_size: int) -> Lanes:
    """Return the times of one backward pass with the unit's class.

    `code` is mine, reference or a file.

    Raises:
        ValueError: the layers cannot be divided evenly into this number of buckets.
    """
    unit = load("distributed_data_parallel", code)
    done = run(
        partial(_backward, unit=unit, bucket_mib=_bucket_mib(num_buckets)),
        world_size,
        net=_net(),
        carrier="threads",
        journal=False,
    )
    done.require_finished()
    found: Lanes = done.values[0]
    return found


def _backward(context: RankContext, unit: Any, bucket_mib: float) -> Lanes:
    comm = context.comm
    ready: list[float] = []
    left: list[float] = []

    def hook(comm: Comm, bucket: Any) -> Work:
        left.append(comm.time())
        work: Work = unit.start_all_reduce(comm, bucket)
        return work

    model = _Layers(context.clock.sleep)
    for weight in model.weights:
        weight.register_post_accumulate_grad_hook(lambda _: ready.append(comm.time()))
    ddp = unit.DistributedDataParallel(
        model, comm, bucket_size_mib=bucket_mib, comm_hook=hook
    )
    loss = ddp(torch.ones((), requires_grad=True))
    comm.barrier()
    began = comm.time()
    loss.backward()
    return Lanes(
        ready_s=tuple(moment - began for moment in ready),
        left_s=tuple(moment - began for moment in left),
        step_s=comm.time() - began,
    )


def torchs_step_s(num_buckets: int, world_size: int) -> float:
    """Return the seconds of the same step with torch's DistributedDataParallel.

    We time the second step, because torch lays out its buckets again after the first.
    """
    done = sim_torch.run(
        _torchs_backward, world_size, _bucket_mib(num_buckets), net=_net()
    )
    done.require_finished()
    return float(done.values[0])


def _torchs_backward(bucket_mib: float) -> float:
    dist.init_process_group("gloo")
    rank = here()
    assert rank is not None
    ddp = nn.parallel.DistributedDataParallel(
        _Layers(rank.clock.sleep), bucket_cap_mb=bucket_mib
    )
    took_s = 0.0
    for _ in range(2):
        loss = ddp(torch.ones((), requires_grad=True))
        dist.barrier()
        began_s = sim_torch.now_s()
        loss.backward()
        took_s = sim_torch.now_s() - began_s
    return took_s


def step_s(num_buckets: int, world_size: int) -> float:
    """Compute the time by the formula, for a network busy from the first bucket on."""
    hops = 2 * (world_size - 1)
    wire_s = 1e8 / world_size / BYTES_PER_S
    return BACKWARD_S / num_buckets + hops * (num_buckets * ALPHA_S + wire_s)


def _net() -> AlphaBeta:
    return AlphaBeta(alpha_s=ALPHA_S, bytes_per_s=BYTES_PER_S / SCALE)


def _bucket_mib(num_buckets: int) -> float:
    if num_buckets < 1 or NUM_LAYERS % num_buckets:
        raise ValueError(
            f"{NUM_LAYERS} layers in {num_buckets} buckets: choose a divisor of "
            f"{NUM_LAYERS}"
        )
    return NUM_LAYERS // num_buckets * 4 * NUMBERS / 2**20
