"""Each rank trains another expert, and nobody's unused parameters become ready.

Report: https://github.com/pytorch/pytorch/issues/128949
Ranks: 2
Kind: mismatch
Guilty: 0,1
Plain: hang
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        return torch.stack([self.experts[i](x) for i in chosen]).sum()


dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(Experts(), bucket_cap_mb=0.01)
model(torch.randn(2, 64), [0, 1, 2, 3]).backward()
chosen = [3, 2] if rank == 0 else [1, 0]
model(torch.randn(2, 64), chosen).backward()  # HERE 0: all_reduce
dist.broadcast(torch.ones(3), src=0)  # HERE 0,1: broadcast
dist.destroy_process_group()
