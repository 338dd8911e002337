"""Rank 0 serves the weights; workers pull, compute and push at their own pace.

Ranks: 3
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
steps = 4
if rank == 0:
    weights = torch.zeros(8)
    for _ in range(steps * (size - 1)):
        grad = torch.empty(8)
        worker = dist.recv(grad)  # from whoever comes first
        weights -= 0.1 * grad
        dist.send(weights, dst=worker)
else:
    weights = torch.zeros(8)
    for _ in range(steps):
        time.sleep(0.1 * rank)
        dist.send(weights + rank, dst=0)
        dist.recv(weights, src=0)
dist.barrier()
dist.destroy_process_group()
