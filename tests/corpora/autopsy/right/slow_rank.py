"""Rank 1 takes three seconds for one step; everyone else waits for it.

Ranks: 3
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(4):
    if rank == 1 and step == 2:
        time.sleep(3)
    grad = torch.ones(8)
    dist.all_reduce(grad)
dist.destroy_process_group()
