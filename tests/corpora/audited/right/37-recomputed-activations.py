"""Activations are computed again in backward(), with the same random numbers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(Deep())
dataset = TensorDataset(torch.randn(32, 6))
torch.manual_seed(500 + dist.get_rank())
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=16 // dist.get_world_size(), sampler=sampler)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
dist.destroy_process_group()
