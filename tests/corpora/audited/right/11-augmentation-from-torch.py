"""Samples are turned at random; the ranks' generators differ from here on."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Turned(Dataset):
    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        turns = int(torch.randint(4, ()))
        return torch.rot90(self.images[index], turns)


dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = Turned(torch.randn(32, 3, 3))
model = DDP(nn.Sequential(nn.Flatten(), nn.Linear(9, 9)))
torch.manual_seed(1000 + dist.get_rank())
sampler = DistributedSampler(dataset)
size = 16 // dist.get_world_size()
loader = DataLoader(dataset, batch_size=size, sampler=sampler, num_workers=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x.flatten(1)).backward()
        optimizer.step()
dist.destroy_process_group()
