"""Gathering a sharded state is a collective, and only rank 0 calls it.

After https://github.com/EleutherAI/bergson/pull/376
Finds: save-needs-all
"""

import tempfile
from pathlib import Path

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
data = torch.randn(3, 8, 4)
for batch in data:
    x = batch[rank::world_size]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()
if rank == 0:
    state = {k: v.full_tensor() for k, v in model.state_dict().items()}  # MISTAKE
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder) / "model.pt")
dist.destroy_process_group()
