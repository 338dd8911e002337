"""Every rank makes every group, in the same order, and uses those it belongs to.

Ranks: 4
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
for distance in (1, 2):
    for first in range(size - distance):
        members = [first, first + distance]
        group = dist.new_group(members)
        if rank in members:
            value = torch.tensor([float(rank)])
            dist.all_reduce(value, group=group)
            assert value.item() == sum(members)
dist.barrier()
dist.destroy_process_group()
