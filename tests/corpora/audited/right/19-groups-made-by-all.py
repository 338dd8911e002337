"""All ranks make both groups; each takes part in its own."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
half = max(1, world_size // 2)
members = [list(range(half)), list(range(half, world_size))]
groups = [dist.new_group(ranks) for ranks in members if ranks]
value = torch.tensor([float(rank)])
for ranks, group in zip(members, groups):
    if rank in ranks:
        dist.all_reduce(value, group=group)
dist.barrier()
print(f"rank {rank}: {value.item()}")
dist.destroy_process_group()
