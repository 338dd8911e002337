"""Each rank votes, the votes are reduced, and all stop after the same epoch.

Ranks: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(4, 1))
for epoch in range(50):
    model(torch.randn(8, 4)).sum().backward()
    is_done = torch.tensor([int(1.0 / (epoch + 1) / (rank + 1) < 0.2)])
    dist.all_reduce(is_done, op=dist.ReduceOp.MAX)
    if is_done:
        break
print(rank, "stops after", epoch)
dist.destroy_process_group()
