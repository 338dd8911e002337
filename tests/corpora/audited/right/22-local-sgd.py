"""Local SGD: ranks train on their own and average their weights now and then."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EVERY = 2
dist.init_process_group("gloo")
world_size = dist.get_world_size()
torch.manual_seed(0)
model = nn.Linear(4, 1)
dataset = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=16 // world_size, sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
step = 0
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        step += 1
        if step % EVERY == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    dist.all_reduce(parameter)
                    parameter /= world_size
dist.destroy_process_group()
