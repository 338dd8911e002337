"""A weight is moved towards the batch's mean, which differs from rank to rank.

After https://github.com/iCog-Labs-Dev/PC-Transformers/pull/135
Finds: replicas-differ
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
layer = nn.Linear(4, 4)
model = DDP(layer)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(5, 16, 4)
for batch in data:
    x = batch[rank::world_size]
    loss = nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        layer.bias.add_(x.mean(0) - layer.bias, alpha=0.01)  # MISTAKE
dist.destroy_process_group()
