"""Ranks with unequal numbers of batches, under Join."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Linear(3, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * world_size)
batches = torch.randn(4 * world_size + 1, 4, 3)
with Join([model]):
    for x in batches[rank::world_size]:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
dist.destroy_process_group()
