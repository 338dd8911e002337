"""Rank 0 validates alone through the DDP module, whose forward broadcasts buffers.

Report: https://github.com/pytorch/pytorch/issues/54059
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
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
    if rank == 0:
        model.eval()
        with torch.no_grad():
            print("val", model(torch.randn(16, 4)).mean().item())  # HERE 0: broadcast
    dist.barrier()  # HERE 1: barrier
dist.destroy_process_group()
