"""Rank 0 evaluates with the DDP module, whose forward() is for all ranks.

After https://github.com/pytorch/pytorch/issues/54059
Finds: rank-condition
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data, labels = torch.randn(48, 4), torch.randint(0, 2, (48,))
for epoch in range(2):
    x, y = data[rank::world_size], labels[rank::world_size]
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    if rank == 0:
        with torch.no_grad():
            guess = model(data).argmax(1)  # MISTAKE
        print("accuracy", (guess == labels).float().mean().item())
    dist.barrier()
dist.destroy_process_group()
