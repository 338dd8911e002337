"""Rank 1 doesn't save, so it returns before the sharded weights are gathered.

Report: https://github.com/huggingface/transformers/pull/48569
Ranks: 2
Kind: mismatch
Guilty: 1
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
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def save_model(should_save: bool) -> None:
    if not should_save:
        return
    whole = {
        name: p.full_tensor() for name, p in model.named_parameters()
    }  # HERE 0: all_gather
    print("saved", list(whole))


for step in range(4):
    out = model(torch.ones(2, 8))  # HERE 1: all_reduce
    out.sum().backward()  # HERE 1: all_reduce
    if step == 1:
        save_model(should_save=dist.get_rank() == 0)
dist.destroy_process_group()
