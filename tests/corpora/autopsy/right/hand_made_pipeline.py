"""Activations go down and gradients come up with send and recv.

Ranks: 3
"""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
layer = nn.Linear(8, 8)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(5):
    x = torch.randn(4, 8)
    if rank > 0:
        dist.recv(x, src=rank - 1)
    x.requires_grad_()
    out = torch.relu(layer(x))
    if rank < size - 1:
        dist.send(out.detach(), dst=rank + 1)
        grad = torch.empty_like(out)
        dist.recv(grad, src=rank + 1)
    else:
        grad = torch.ones_like(out)
    out.backward(grad)
    if rank > 0:
        dist.send(x.grad, dst=rank - 1)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
