"""FSDP2: all ranks gather the state, rank 0 writes it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
for layer in (model[0], model[2], model):
    fully_shard(layer)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for batch in torch.randn(3, 8, 4):
    x = batch[rank::world_size]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()
state = {name: value.full_tensor() for name, value in model.state_dict().items()}
if rank == 0:
    torch.save(state, "model.pt")
dist.barrier()
dist.destroy_process_group()
