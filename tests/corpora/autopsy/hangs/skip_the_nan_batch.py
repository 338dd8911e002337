"""Rank 1 skips a batch whose loss is NaN, so its gradients are one behind for good.

Report: https://github.com/NVIDIA-NeMo/Automodel/pull/2468
Ranks: 2
Kind: mismatch
Guilty: 0
Plain: hang
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    inputs = torch.randn(8, 4)
    if rank == 1 and step == 3:
        inputs[0, 0] = float("nan")
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    if loss.isnan():
        continue
    loss.backward()  # HERE 0: all_reduce
    optimizer.step()
dist.barrier()  # HERE 1: barrier
dist.destroy_process_group()
