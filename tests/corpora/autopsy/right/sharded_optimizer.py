"""Each rank updates its share of the parameters and broadcasts them.

Ranks: 3
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [nn.Linear(12, 12) for _ in range(4)]
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 12)).square().mean().backward()
    optimizer.step()
dist.barrier()
dist.destroy_process_group()
