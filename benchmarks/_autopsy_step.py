"""A rank of `distlab bench autopsy --overhead`: what a DDP step costs it.

It prints one JSON line: the median seconds of a step, by the clock and of this process.
A step trains 6.3 million parameters in four buckets, about 50 ms of computation on one
core.
"""

from __future__ import annotations

import json
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WARM_UP, STEPS, ROUNDS = 10, 10, 8


def main() -> None:
    """Train, and print the medians of this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers = [nn.Linear(1024, 1024) for _ in range(6)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(256, 1024)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    for _ in range(WARM_UP):
        step()
    by_clock, of_process = [], []
    for _ in range(ROUNDS):
        dist.barrier()
        started_s, used_s = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            step()
        by_clock.append((time.perf_counter() - started_s) / STEPS)
        of_process.append((time.process_time() - used_s) / STEPS)
    medians = {
        "step_s": statistics.median(by_clock),
        "cpu_s": statistics.median(of_process),
    }
    print(json.dumps(medians), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
