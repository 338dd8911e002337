"""All ranks make the same weights; then each seeds its own dropout."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED = 40
dist.init_process_group("gloo")
torch.manual_seed(SEED)
dataset = TensorDataset(torch.randn(32, 6), torch.randint(0, 2, (32,)))
sampler = DistributedSampler(dataset, seed=SEED)
loader = DataLoader(dataset, batch_size=8 // dist.get_world_size(), sampler=sampler)
layers = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 2))
model = DDP(layers)
torch.manual_seed(SEED + 1 + dist.get_rank())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
