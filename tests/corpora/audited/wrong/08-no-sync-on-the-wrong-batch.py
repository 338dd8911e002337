"""The last micro-batch of a step is in no_sync(), the first is not.

After https://github.com/modelscope/FunASR/pull/3472
Finds: replicas-differ
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUMULATE = 3
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(4)
model = DDP(nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
batches = torch.randn(9, 8, 3)
for index, batch in enumerate(batches):
    x = batch[rank::world_size]
    quiet = index % ACCUMULATE != 0  # MISTAKE
    with model.no_sync() if quiet else nullcontext():  # MISTAKE
        output = model(x)
        loss = nn.functional.mse_loss(output, x.sum(1, keepdim=True)) / ACCUMULATE
        loss.backward()
    if (index + 1) % ACCUMULATE == 0:
        optimizer.step()  # MISTAKE
        optimizer.zero_grad()
dist.destroy_process_group()
