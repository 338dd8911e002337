"""A plain shuffling loader: each rank goes through all samples.

After https://github.com/Lightning-AI/pytorch-lightning/issues/6423
Finds: samples-repeated
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

dist.init_process_group("gloo")
generator = torch.Generator().manual_seed(3)
x = torch.randn(40, 4, generator=generator)
y = x.sum(1, keepdim=True)
batch_size = 8 // dist.get_world_size()
loader = DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=True)  # MISTAKE
torch.manual_seed(0)
model = DDP(nn.Linear(4, 1))
torch.manual_seed(dist.get_rank())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(2):
    for features, target in loader:
        loss = nn.functional.mse_loss(model(features), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
