"""Noise is drawn in the loop, from generators that the ranks seeded unlike."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(40, 6))
model = DDP(nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 6)))
sampler = DistributedSampler(dataset, drop_last=True)
size = 8 // dist.get_world_size()
loader = DataLoader(dataset, batch_size=size, sampler=sampler, drop_last=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(900 + rank)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (clean,) in loader:
        noise = torch.randn_like(clean)
        level = torch.rand(len(clean), 1)
        loss = nn.functional.mse_loss(model(clean + level * noise), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
