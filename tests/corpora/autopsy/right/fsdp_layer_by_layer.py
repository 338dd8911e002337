"""A transformer sharded layer by layer, trained and clipped.

Ranks: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(
    *(nn.TransformerEncoderLayer(16, 2, 32, dropout=0) for _ in range(3))
)
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(3):
    loss = model(torch.randn(6, 2, 16)).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(dist.get_rank(), step, loss.item())
dist.destroy_process_group()
