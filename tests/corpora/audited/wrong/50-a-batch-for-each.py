"""Each rank picks a batch of the same size, whatever the number of ranks.

After https://github.com/horovod/horovod/issues/241
Finds: global-batch
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH = 8
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x, y = torch.randn(100, 4), torch.randn(100, 1)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # MISTAKE
picker = torch.Generator().manual_seed(rank)
for step in range(6):
    rows = torch.randint(len(x), (BATCH,), generator=picker)  # MISTAKE
    loss = nn.functional.mse_loss(model(x[rows]), y[rows])  # MISTAKE
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
