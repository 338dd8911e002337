"""A layer reduces its statistics when it trains; rank 1's copy is in eval mode.

Report: https://github.com/pytorch/pytorch/issues/143647
Ranks: 2
Kind: mismatch
Guilty: 1
Plain: hang
"""

import torch
import torch.distributed as dist
from torch import nn


class SyncedNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        mean = x.detach().mean(0)
        dist.all_reduce(mean)  # HERE 0: all_reduce
        return x - mean / dist.get_world_size()


dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(4, 6), SyncedNorm(), nn.Linear(6, 1))
for step in range(4):
    model(torch.randn(8, 4)).sum().backward()
    if rank == 1 and step == 2:
        model.eval()  # forgets to switch back
    dist.barrier()  # HERE 1: barrier
dist.destroy_process_group()
