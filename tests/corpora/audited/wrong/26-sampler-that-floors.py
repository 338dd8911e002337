"""A sampler of one's own shortens the data set before it shuffles.

After https://github.com/modelscope/ms-swift/pull/9907
Finds: samples-lost
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class ShardSampler(Sampler):
    def __init__(self, length, rank, world_size, seed=0):
        self.length = length // world_size  # MISTAKE
        self.rank, self.world_size, self.seed, self.epoch = rank, world_size, seed, 0

    def __len__(self):
        return self.length

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.length * self.world_size, generator=generator)
        return iter(order[self.rank :: self.world_size].tolist())


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
dataset = TensorDataset(torch.randn(43, 4))
sampler = ShardSampler(len(dataset), rank, world_size)
size = 20 // world_size
loader = DataLoader(dataset, batch_size=size, sampler=sampler)  # MISTAKE
model = DDP(nn.Linear(4, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(3):
    sampler.epoch = epoch
    for (x,) in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
dist.destroy_process_group()
