"""Rank 0 evaluates model.module, which communicates with nobody; the others wait.

Ranks: 3
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
for epoch in range(2):
    for _ in range(3):
        model(torch.randn(8, 4)).sum().backward()
    if dist.get_rank() == 0:
        model.eval()
        with torch.no_grad():
            for _ in range(10):
                model.module(torch.randn(2, 4))
                time.sleep(0.2)
        model.train()
    dist.barrier()
dist.destroy_process_group()
