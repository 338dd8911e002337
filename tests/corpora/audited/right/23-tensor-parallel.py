"""Tensor parallelism: all ranks compute parts of one layer on the same batch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
model = parallelize_module(Block(), mesh, plan)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
for x in torch.randn(4, 8, 8):
    loss = nn.functional.mse_loss(model(x), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
