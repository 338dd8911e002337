"""What each rank does for `benchmarks/ddp.py`: the same model twice, ours and torch's.

Both get their gradients through one gloo group, with buckets of one size.
"""

from __future__ import annotations

import copy
import time
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._ratios import in_turn
from distlab.comm import Comm, Work
from distlab.curriculum import load
from distlab.models.transformer import (
    TransformerConfig,
    make_transformer,
    next_token_loss,
)
from distlab.runner import RankContext
from tests.corpora.both_ways import CONFIG, leave, meet

UNIT = "distributed_data_parallel"
BUCKET_MIB = 4.0
BATCH = 8
WARM_UP = 3


def tokens_of(config: TransformerConfig, batch: int, seed: int) -> Tensor:
    """A batch (batch, context)."""
    generator = torch.Generator().manual_seed(seed)
    shape = batch, config.context
    return torch.randint(0, config.vocab_size, shape, generator=generator)


def wrap_ours(unit: ModuleType, model: nn.Module, comm: Comm, **more: Any) -> nn.Module:
    """The unit's."""
    made: nn.Module = unit.DistributedDataParallel(
        model, comm, bucket_size_mib=BUCKET_MIB, **more
    )
    return made


def wrap_torchs(model: nn.Module) -> nn.Module:
    """The same, by torch."""
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MIB)


def step_pairs(
    context: RankContext, folder: str, side: str, count: int
) -> list[tuple[float, ...]]:
    """Seconds of a step, ours and torch's, `count` times in turn."""
    comm = meet(context, folder)
    unit = load(UNIT, side)
    model = make_transformer(CONFIG, seed=0).float()
    both = [wrap_ours(unit, copy.deepcopy(model), comm), wrap_torchs(model)]
    tokens = tokens_of(CONFIG, BATCH, context.rank)

    def step(ddp: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        next_token_loss(ddp(tokens), tokens).backward()
        optimizer.step()

    ways = [
        partial(step, ddp, torch.optim.SGD(ddp.parameters(), lr=1e-3)) for ddp in both
    ]
    found = in_turn(ways, count, warm_up=WARM_UP, before=dist.barrier)
    leave()
    return found


def overlap(context: RankContext, folder: str, side: str) -> list[list[float]]:
    """Of some steps: first departure, last gradient, return of backward().

    Each in seconds since backward() began.
    """
    comm = meet(context, folder)
    unit = load(UNIT, side)
    left: list[float] = []
    ready: list[float] = []

    def hook(comm: Comm, bucket: Any) -> Work:
        left.append(time.perf_counter())
        work: Work = unit.start_all_reduce(comm, bucket)
        return work

    model = make_transformer(CONFIG, seed=0).float()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: ready.append(time.perf_counter())
        )
    ddp = wrap_ours(unit, model, comm, comm_hook=hook)
    tokens = tokens_of(CONFIG, BATCH, context.rank)
    found = []
    for _ in range(WARM_UP + 5):
        left.clear()
        ready.clear()
        ddp.zero_grad()
        loss = next_token_loss(ddp(tokens), tokens)
        began = time.perf_counter()
        loss.backward()
        over = time.perf_counter()
        found.append([moment - began for moment in (left[0], ready[-1], over)])
    leave()
    return found[WARM_UP:]


def peak_bytes(context: RankContext, folder: str, side: str, whose: str) -> int:
    """The most bytes of tensors alive at once, from before wrapping to after a step.

    Weights are not in it: the model is there before. The batch is one short sequence,
    so that gradients and buckets are nearly all that is.
    """
    comm = meet(context, folder)
    unit = load(UNIT, side)
    model = make_transformer(CONFIG, seed=0).float()
    tokens = tokens_of(CONFIG, 1, context.rank)[:, :2]
    dist.all_reduce(torch.ones(1))
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        ddp = wrap_ours(unit, model, comm) if whose == "ours" else wrap_torchs(model)
        for _ in range(3):
            ddp.zero_grad()
            next_token_loss(ddp(tokens), tokens).backward()
    leave()
    return _peak(profile)


def _peak(profile: Any) -> int:
    """The highest sum of what was allocated and freed, in the order of time."""
    moments = sorted(
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    now = most = 0
    for _, num_bytes in moments:
        now += num_bytes
        most = max(most, now)
    return most
