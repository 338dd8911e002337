"""Rank 0 reads the settings and hands them to the others as an object."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
box = [{"lr": 0.05, "steps": 3, "seed": 11}] if rank == 0 else [None]
dist.broadcast_object_list(box, src=0)
settings = box[0]
torch.manual_seed(settings["seed"])
model = DDP(nn.Linear(6, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=settings["lr"])
losses = []
for batch in torch.randn(settings["steps"], 16, 6):
    x = batch[rank::world_size]
    loss = nn.functional.mse_loss(model(x), x[:, :2])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    shown = loss.detach().clone()
    dist.all_reduce(shown)
    losses.append(shown.item() / world_size)
everyone = [None] * world_size
dist.all_gather_object(everyone, losses)
dist.destroy_process_group()
