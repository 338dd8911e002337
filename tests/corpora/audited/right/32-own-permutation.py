"""One permutation for all ranks, of which each takes its part of every batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

GLOBAL_BATCH = 8
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x, y = torch.randn(40, 3), torch.randn(40, 1)
model = DDP(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
shuffler = torch.Generator().manual_seed(7)
for epoch in range(2):
    order = torch.randperm(len(x), generator=shuffler)
    for batch in order.split(GLOBAL_BATCH):
        mine = batch[rank::world_size]
        loss = nn.functional.mse_loss(model(x[mine]), y[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
