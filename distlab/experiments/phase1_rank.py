"""What each rank does in the walkthrough of phase 1; `unit` is the learner's module.

Scenarios as the autograder's: `(context, unit, **values) -> plain data`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.runner import RankContext

NUM_CHUNKS = 4
_ROUNDS = 5  # of a measurement, of which the median counts


def hello(context: RankContext, unit: ModuleType, *, seed: int = 0) -> str:
    """Who this rank is, in its own words."""
    first = ", ".join(str(sample) for sample in range(9)[context.rank :: 4][:2])
    return f"rank {context.rank} of {context.world_size}: my samples are {first}, …"


def ring_shift(context: RankContext, unit: ModuleType, *, seed: int = 0) -> list[float]:
    """What this rank held, and what came from its left neighbor."""
    outgoing = torch.tensor([10.0 + context.rank])
    incoming = torch.zeros(1)
    unit.ring_shift(context.comm, outgoing, incoming)
    return [float(outgoing), float(incoming)]


def ring_of_sends(context: RankContext, unit: ModuleType, *, seed: int = 0) -> None:
    """A deadlock: every rank sends first, so no rank receives."""
    comm = context.comm
    outgoing, incoming = torch.ones(1), torch.zeros(1)
    comm.send(outgoing, (comm.rank + 1) % comm.world_size)
    comm.recv(incoming, (comm.rank - 1) % comm.world_size)


def family(
    context: RankContext, unit: ModuleType, *, seed: int = 0
) -> dict[str, list[int]]:
    """Four collectives on bits: in a chunk, bit r says that rank r's part is in it."""
    comm, n = context.comm, context.world_size
    own = torch.full((n,), 1 << comm.rank)
    results = {"before": own, "broadcast": own.clone(), "all_reduce": own.clone()}
    unit.broadcast(comm, results["broadcast"], 0)
    unit.all_reduce(comm, results["all_reduce"])
    results["all_gather"] = torch.zeros(n, dtype=own.dtype)
    unit.all_gather(comm, results["all_gather"], own[:1].clone())
    results["reduce_scatter"] = torch.zeros(1, dtype=own.dtype)
    unit.reduce_scatter(comm, results["reduce_scatter"], own.clone())
    return {name: tensor.tolist() for name, tensor in results.items()}


def weighted_mean(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    counts: tuple[int, ...],
    gradients: tuple[float, ...],
) -> float:
    """What the learner's average_weighted makes of one gradient per rank."""
    model = nn.Linear(1, 1, bias=False)
    own = torch.full((1, 1), gradients[context.rank])
    model.weight.grad = own
    unit.average_weighted(context.comm, model, counts[context.rank])
    return float(model.weight.grad)


def ping_pong(
    context: RankContext, unit: ModuleType, *, seed: int = 0, sizes: tuple[int, ...]
) -> list[float]:
    """Seconds that one message of each size (bytes) takes between ranks 0 and 1."""
    comm, times = context.comm, []
    for size in sizes:
        buffer = torch.zeros(size, dtype=torch.uint8)
        there_and_back = _round_trip(comm, buffer)
        times.append(_median_s(comm, there_and_back) / 2)
    return times


def flat_or_not(
    context: RankContext, unit: ModuleType, *, seed: int = 0
) -> list[float]:
    """Seconds for 100 gradients of 1,000 floats: one call each, or one for all."""
    gradients = [torch.ones(1_000) for _ in range(100)]

    def one_by_one() -> None:
        for gradient in gradients:
            context.comm.all_reduce(gradient)

    def in_one_call() -> None:
        context.comm.all_reduce(torch.cat(gradients))

    return [_median_s(context.comm, way) for way in (one_by_one, in_one_call)]


def _round_trip(comm: Comm, buffer: Tensor) -> Callable[[], None]:
    def there_and_back() -> None:
        if comm.rank == 0:
            comm.send(buffer, 1)
            comm.recv(buffer, 1)
        elif comm.rank == 1:
            comm.recv(buffer, 0)
            comm.send(buffer, 0)

    return there_and_back


def _median_s(comm: Comm, action: Callable[[], Any]) -> float:
    action()  # the first one opens connections
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        action()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def samples_of_all(
    context: RankContext,
    unit: ModuleType,
    *,
    seed: int = 0,
    num_samples: int,
    num_ranks: int,
    epoch: int,
) -> list[list[int]]:
    """The samples that each rank's sampler gives in this epoch."""
    found = []
    for rank in range(num_ranks):
        sampler = unit.DistributedSampler(num_samples, rank, num_ranks)
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found


def one_all_reduce(context: RankContext, unit: ModuleType, *, seed: int = 0) -> None:
    """The gradients of the digits' network, 4,810 floats, in one call."""
    unit.all_reduce(context.comm, torch.ones(4_810))
