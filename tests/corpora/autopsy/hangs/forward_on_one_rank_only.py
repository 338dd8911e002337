"""Rank 1 alone runs the DDP model a second time; each forward sends its buffers.

Report: https://github.com/pytorch/pytorch/issues/89716
Ranks: 3
Kind: mismatch
Guilty: 1
Plain: hang
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
encoder = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
model = DistributedDataParallel(encoder)
for step in range(3):
    model(torch.randn(8, 4)).sum().backward()
    if rank == 1 and step == 1:
        hard_examples = model(torch.randn(8, 4))  # HERE 1: broadcast
    total = torch.ones(1)
    dist.all_reduce(total)  # HERE 0,2: all_reduce
dist.destroy_process_group()
