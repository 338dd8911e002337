"""join() shadows the collectives of the ranks that have run out of batches.

Ranks: 3
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
seen = 0
with Join([model]):
    for _ in range(3 + 2 * rank):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        seen += 1
print(rank, "has seen", seen, "batches")
dist.destroy_process_group()
