"""The learning rate grows with the ranks, but the global batch stays as it is.

After https://github.com/horovod/horovod/issues/1619
Finds: learning-rate
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, RATE = 8, 1e-3
dist.init_process_group("gloo")
world_size = dist.get_world_size()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(40, 3), torch.randn(40, 1))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // world_size, sampler=sampler)
model = DDP(nn.Linear(3, 1))
rate = RATE * world_size  # MISTAKE
optimizer = torch.optim.Adam(model.parameters(), lr=rate)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
