"""A model cut in two by hand: activations go one way, gradients come back."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
front, back = nn.Linear(4, 6), nn.Linear(6, 4)
last = world_size - 1
stage = back if rank == last else front
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
for x in torch.randn(3, 8, 4):
    if world_size == 1 or 0 < rank < last:
        continue
    optimizer.zero_grad()
    if rank == 0:
        hidden = front(x)
        dist.send(hidden.detach(), last)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, last)
        hidden.backward(gradient)
    else:
        hidden = torch.empty(8, 6, requires_grad=True)
        dist.recv(hidden.data, 0)
        nn.functional.mse_loss(back(hidden), x).backward()
        dist.send(hidden.grad, 0)
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
