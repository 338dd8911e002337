"""Gradient accumulation: all micro-batches but the last of a step are in no_sync()."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 4
dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(64, 3), torch.randn(64, 2))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8 // dist.get_world_size(), sampler=sampler)
model = DDP(nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for index, (x, y) in enumerate(loader):
        last = (index + 1) % ACCUMULATE == 0
        with nullcontext() if last else model.no_sync():
            loss = nn.functional.mse_loss(model(x), y) / ACCUMULATE
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
