"""The data set is split by rank, and then a distributed sampler splits each part.

After https://github.com/pixeli99/SVD_Xtend/issues/78
Finds: samples-lost
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
videos = TensorDataset(torch.randn(64, 3))
mine = Subset(videos, range(rank, len(videos), world_size))  # MISTAKE
sampler = DistributedSampler(mine, shuffle=False)  # MISTAKE
size = 8 // world_size
loader = DataLoader(mine, batch_size=size, sampler=sampler)  # MISTAKE
model = DDP(nn.Linear(3, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
dist.destroy_process_group()
