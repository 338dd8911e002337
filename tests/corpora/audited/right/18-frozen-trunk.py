"""Fine-tuning: the trunk needs no gradients, the head does."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
trunk, head = nn.Linear(8, 8), nn.Linear(8, 2)
for parameter in trunk.parameters():
    parameter.requires_grad = False
model = DDP(nn.Sequential(trunk, nn.Tanh(), head))
dataset = TensorDataset(torch.randn(32, 8), torch.randint(0, 2, (32,)))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8 // dist.get_world_size(), sampler=sampler)
optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
