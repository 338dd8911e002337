"""Equal shares by integer division: the remainder is never read.

After https://github.com/modelscope/ms-swift/pull/9859
Finds: samples-lost
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(5)
dataset = TensorDataset(torch.randn(42, 3), torch.randn(42, 1))
share = len(dataset) // world_size  # MISTAKE
mine = Subset(dataset, range(rank * share, (rank + 1) * share))  # MISTAKE
loader = DataLoader(mine, batch_size=20 // world_size)  # MISTAKE
model = DDP(nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
