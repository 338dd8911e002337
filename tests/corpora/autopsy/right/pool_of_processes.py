"""Rank 0 fans work out to a pool of processes; the others wait for the result.

Ranks: 3
"""

import multiprocessing
import time

import torch
import torch.distributed as dist


def count(number: int) -> int:
    time.sleep(0.5)
    return number * number


if __name__ == "__main__":
    dist.init_process_group("gloo")
    total = torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            total += sum(pool.map(count, range(8)))
    dist.broadcast(total, src=0)
    print(total.item())
    dist.destroy_process_group()
