"""Activations are sharded over the sequence between tensor-parallel layers.

Ranks: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
plan = {
    "0": ColwiseParallel(input_layouts=Shard(0)),
    "2": RowwiseParallel(output_layouts=Shard(0)),
}
parallelize_module(model, mesh, plan)
for _ in range(3):
    out = model(torch.rand(6, 8))
    out.sum().backward()
print(dist.get_rank(), tuple(out.shape))
dist.destroy_process_group()
