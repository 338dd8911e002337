"""Shares by rounding up: the last rank has fewer batches, the others wait for it.

After https://github.com/k2-fsa/snowfall/issues/152
Finds: rank-condition
"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
utterances = torch.randn(21, 5)
share = math.ceil(len(utterances) / world_size)
mine = utterances[rank * share : (rank + 1) * share]  # MISTAKE
loader = DataLoader(TensorDataset(mine), batch_size=2)  # MISTAKE
model = DDP(nn.Linear(5, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in loader:  # MISTAKE
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), x)  # MISTAKE
    loss.backward()  # MISTAKE
    optimizer.step()
dist.destroy_process_group()
