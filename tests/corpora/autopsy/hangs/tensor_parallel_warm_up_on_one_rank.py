"""One tensor-parallel rank runs a warm-up forward of its own.

Report: https://github.com/meta-pytorch/gpt-fast/issues/55
Ranks: 2
Kind: mismatch
Guilty: 0
Plain: hang
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
prompts = [torch.ones(2, 8) for _ in range(3)]
if rank == 0:
    prompts.insert(0, torch.zeros(1, 8))  # compiles the kernels
for prompt in prompts:
    out = model(prompt)  # HERE 0,1: all_reduce
    print(rank, out.sum().item())
dist.destroy_process_group()
