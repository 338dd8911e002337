"""Blocks go around a ring: isend to the right, recv from the left, then wait.

Ranks: 4
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
block = torch.full((1000,), float(rank))
total = block.clone()
for _ in range(size - 1):
    work = dist.isend(block.clone(), dst=(rank + 1) % size)
    dist.recv(block, src=(rank - 1) % size)
    work.wait()
    total += block
assert total[0].item() == sum(range(size))
dist.destroy_process_group()
