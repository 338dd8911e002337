"""A schedule with a warm-up that does not depend on the number of ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WARM_UP, STEPS = 3, 8
dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(64, 4), torch.randn(64, 4))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=16 // dist.get_world_size(), sampler=sampler)
model = DDP(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min(1.0, (step + 1) / WARM_UP) * (1 - step / (2 * STEPS))
)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.smooth_l1_loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
dist.destroy_process_group()
