"""A rank of `distlab bench autopsy --overhead`: what a DDP step costs it.

It prints one JSON line: pairs of seconds per step, with recording and without, by the
clock and of this process; and the seconds of this process that a call of torch takes.
Recording is paused for every second round, so both sides have the same memory, cores
and neighbors. Torch's own flight recorder can't be paused: it is on in both sides, or
in none, so its cost is in the seconds per call.

A step trains 6.3 million parameters in four buckets, about 50 ms of computation on one
core.
"""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distlab.recorder.attach import pause

WARM_UP, STEPS, ROUNDS, CALLS = 10, 10, 8, 2000
Seconds = tuple[float, float]
"""By the clock, and of this process."""


def main() -> None:
    """Train, and print the pairs of this rank."""
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

    def times(number: int) -> Seconds:
        dist.barrier()
        started_s, used_s = time.perf_counter(), time.process_time()
        for _ in range(number):
            step()
        clock_s = time.perf_counter() - started_s
        return clock_s / number, (time.process_time() - used_s) / number

    times(WARM_UP)
    rounds: list[tuple[Seconds, Seconds]] = []
    for number in range(ROUNDS):
        found: dict[bool, Seconds] = {}
        for paused in (True, False) if number % 2 else (False, True):
            pause(paused)
            found[paused] = times(STEPS)
        rounds.append((found[False], found[True]))
    pause(True)
    call_s = seconds_of_a_call()
    pause(False)
    told = {
        "clock": [(on[0], off[0]) for on, off in rounds],
        "cpu": [(on[1], off[1]) for on, off in rounds],
        "call_s": call_s,
    }
    print(json.dumps(told), flush=True)
    dist.destroy_process_group()


def seconds_of_a_call() -> float:
    """Processor seconds of a call that torch records, if it records."""
    number = torch.zeros(1)
    dist.barrier()
    used_s = time.process_time()
    for _ in range(CALLS):
        dist.all_reduce(number)
    return (time.process_time() - used_s) / CALLS


if __name__ == "__main__":
    main()
