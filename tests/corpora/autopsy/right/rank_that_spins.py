"""Rank 0 spins in Python for three seconds before it joins the others.

Ranks: 2
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
if rank == 0:
    until = time.monotonic() + 3
    tries = 0
    while time.monotonic() < until:
        tries += 1
    print(tries)
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
