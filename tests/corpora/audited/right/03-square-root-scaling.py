"""Adam, with a learning rate that grows with the square root of the global batch."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(1)
dataset = TensorDataset(torch.randn(48, 4))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 4)))
rate = 1e-3 * math.sqrt(dist.get_world_size())
optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
dist.destroy_process_group()
