"""Autocast to bfloat16, and gradients that are clipped after they were reduced."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(64, 8), torch.randn(64, 8))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=16 // dist.get_world_size(), sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            prediction = model(x)
        loss = nn.functional.mse_loss(prediction.to(y.dtype), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
dist.destroy_process_group()
