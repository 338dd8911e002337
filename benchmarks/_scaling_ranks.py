"""Epochs of torch's DDP with and without messages, on the ranks of a cluster."""

from __future__ import annotations

import contextlib
from functools import partial

import torch
from torch import nn

from benchmarks._ratios import in_turn
from distlab.engines.config import DistributedConfig
from distlab.engines.samples import epoch_plan
from distlab.engines.torch_strategy import Torch
from distlab.models.convnet import make_convnet
from distlab.runner import RankContext
from tests.corpora.both_ways import leave, meet

NUM_SAMPLES, BATCH = 1024, 32


def epochs(
    context: RankContext, folder: str, num_epochs: int
) -> list[tuple[float, ...]]:
    """Seconds of an epoch with messages and of one without, in turn, on this rank."""
    meet(context, folder)
    config = DistributedConfig(num_gpus=context.world_size)
    strategy = Torch(config, make_convnet(), lambda p: torch.optim.SGD(p, lr=0.01))
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(NUM_SAMPLES, 1, 28, 28, generator=generator)
    targets = torch.arange(NUM_SAMPLES) % 10
    plan = epoch_plan(
        range(NUM_SAMPLES),
        rank=context.rank,
        world_size=context.world_size,
        batch_size=BATCH,
    )

    def epoch(is_silent: bool) -> None:
        for micro in plan:
            own = list(micro.indices)
            with strategy.no_sync() if is_silent else contextlib.nullcontext():
                outputs = strategy.forward(images[own].to(strategy.device))
                loss = nn.functional.cross_entropy(
                    outputs, targets[own].to(strategy.device)
                )
                strategy.backward(loss)
            strategy.optimizer.step()
            strategy.optimizer.zero_grad()

    ways = [partial(epoch, False), partial(epoch, True)]
    found = in_turn(ways, num_epochs, warm_up=1, before=context.comm.barrier)
    strategy.close()
    leave()
    return found
