"""Rare classes are drawn more often, with replacement, by each rank on its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
labels = (torch.rand(80) < 0.2).long()
dataset = TensorDataset(torch.randn(80, 4), labels)
weights = 1.0 / torch.bincount(labels)[labels]
generator = torch.Generator().manual_seed(100 + rank)
sampler = WeightedRandomSampler(weights, 80 // world_size, generator=generator)
loader = DataLoader(dataset, batch_size=16 // world_size, sampler=sampler)
model = DDP(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
