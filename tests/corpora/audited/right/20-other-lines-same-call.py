"""Rank 0 sends and the others receive in the same broadcast, on other lines."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
if rank == 0:
    numbers = torch.arange(8.0)
    dist.broadcast(numbers, src=0)
else:
    numbers = torch.empty(8)
    dist.broadcast(numbers, src=0)
mine = numbers[rank % 8].clone()
if rank == 0:
    parts = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.gather(mine, parts)
    print(torch.stack(parts).tolist())
else:
    dist.gather(mine)
dist.destroy_process_group()
