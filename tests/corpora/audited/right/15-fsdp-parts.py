"""FSDP2: each rank saves its own part under its own name."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for batch in torch.randn(4, 8, 6):
    x = batch[rank::world_size]
    loss = nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
parts = {name: value.to_local() for name, value in model.state_dict().items()}
torch.save(parts, f"part-{rank}-of-{world_size}.pt")
dist.destroy_process_group()
