"""Three steps of a small model, as a script for torchrun: `small.py ddp`, or fsdp2."""

import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, BATCH = 64, 4, 8


def wrapped(way: str) -> nn.Module:
    """The model, replicated or sharded."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    if way == "ddp":
        return DistributedDataParallel(model)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model


def main() -> None:
    """Train, and print the seconds of each step on rank 0."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = wrapped(sys.argv[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = torch.randn(BATCH, WIDTH)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        seconds.append(time.perf_counter() - started)
    if dist.get_rank() == 0:
        print(json.dumps(seconds))
    dist.destroy_process_group()


main()
