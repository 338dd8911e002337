"""Groups are destroyed one by one, and a new one is made afterwards.

Ranks: 3
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for generation in range(3):
    group = dist.new_group([0, 1, 2])
    dist.all_reduce(torch.ones(generation + 1), group=group)
    dist.barrier()
    dist.destroy_process_group(group)
dist.barrier()
dist.destroy_process_group()
