"""Rank 1 takes a lock that it holds already; the others wait in a reduction.

Report: https://github.com/pytorch/pytorch/issues/1355
Ranks: 3
Kind: apart
Guilty: 1
Plain: hang
"""

import threading

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
lock = threading.Lock()


def cached(step: int) -> torch.Tensor:
    with lock:  # HERE 1: apart
        if rank == 1 and step == 4:
            return cached(step - 1)
        return torch.full((4,), float(step))


def load(step: int) -> torch.Tensor:
    return cached(step)


for step in range(8):
    dist.all_reduce(load(step))  # HERE 0,2: all_reduce
dist.destroy_process_group()
