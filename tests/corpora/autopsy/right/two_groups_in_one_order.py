"""Two groups of the same ranks, always entered in the same order.

Ranks: 2
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
embeddings, dense = dist.new_group(), dist.new_group()
for _ in range(10):
    dist.all_reduce(torch.ones(32), group=embeddings)
    dist.all_reduce(torch.ones(8), group=dense)
dist.destroy_process_group()
