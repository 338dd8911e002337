"""Rank 2 is done after a few steps; the rest train on in a group without it.

Ranks: 3
"""

import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
rest = dist.new_group([0, 1])
for _ in range(3):
    dist.all_reduce(torch.ones(2))
if rank == 2:
    sys.exit(0)
for _ in range(10):
    time.sleep(0.2)
    dist.all_reduce(torch.ones(2), group=rest)
