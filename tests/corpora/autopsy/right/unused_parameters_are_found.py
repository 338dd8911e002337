"""Branches differ between ranks, and DDP is told to look for unused parameters.

Ranks: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 2)])

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.body(x)).sum()


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
for step in range(4):
    model(torch.randn(2, 4), head=(rank + step) % 2).backward()
dist.destroy_process_group()
