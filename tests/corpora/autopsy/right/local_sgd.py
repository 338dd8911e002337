"""Weights are averaged every fifth step; in between, the ranks don't communicate.

Ranks: 2
"""

import time

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(20):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    time.sleep(0.1 if rank else 0.0)
    if step % 5 == 4:
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= size
dist.destroy_process_group()
