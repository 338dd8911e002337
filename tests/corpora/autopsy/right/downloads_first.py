"""Rank 0 downloads the data for five seconds, and the others wait in a barrier.

Ranks: 3
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    time.sleep(5)
dist.barrier()
data = torch.arange(10)
dist.all_reduce(data)
dist.destroy_process_group()
