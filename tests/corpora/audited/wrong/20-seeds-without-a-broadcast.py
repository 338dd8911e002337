"""Each rank makes its own weights, and only gradients are reduced.

After https://github.com/facebookresearch/fairscale/issues/584
Finds: replicas-differ
"""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(100 + rank)  # MISTAKE
model = nn.Linear(4, 2)  # MISTAKE
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(4, 16, 4, generator=torch.Generator().manual_seed(1))
for batch in data:
    x = batch[rank::world_size]
    loss = nn.functional.mse_loss(model(x), x[:, :2])
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
    optimizer.step()
dist.destroy_process_group()
