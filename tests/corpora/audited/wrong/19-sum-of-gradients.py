"""Gradients are summed over the ranks, and never divided.

After https://github.com/pytorch/pytorch/issues/5778
Finds: not-the-same-training
"""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(6, 16, 5)
for batch in data:
    x = batch[rank::world_size]
    loss = nn.functional.mse_loss(model(x), x.mean(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # MISTAKE
    optimizer.step()
dist.destroy_process_group()
