"""Each rank makes only the group that it belongs to.

After https://github.com/pytorch/pytorch/issues/25390
Finds: rank-condition
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
half = world_size // 2
if rank < half:
    group = dist.new_group(list(range(half)))  # MISTAKE
else:
    others = list(range(half, world_size))
    group = dist.new_group(others)  # MISTAKE
value = torch.tensor([float(rank)])
dist.all_reduce(value, group=group)
print(f"rank {rank}: {value.item()}")
dist.destroy_process_group()
