"""Rank 0 saves the model, the others wait, and all of them load it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(6, 8, 4)
for step, batch in enumerate(data):
    x = batch[rank::world_size]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()
    if step == 2:
        if rank == 0:
            torch.save(model.state_dict(), "checkpoint.pt")
        dist.barrier()
        model.load_state_dict(torch.load("checkpoint.pt", weights_only=True))
dist.destroy_process_group()
