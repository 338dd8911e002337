"""A generator with a fixed seed, copied into every worker of every rank.

After https://github.com/wolny/pytorch-3dunet/issues/32
Finds: same-random-numbers
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Rotated(Dataset):
    def __init__(self, count):
        self.values = torch.linspace(0, 1, count)
        self.random = np.random.default_rng(47)  # MISTAKE

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        angle = self.random.uniform(0, 6.28)
        return self.values[index] * torch.tensor([np.cos(angle), np.sin(angle)]).float()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Rotated(32)
    sampler = DistributedSampler(dataset)
    size = 8 // dist.get_world_size()
    loader = DataLoader(dataset, batch_size=size, sampler=sampler, num_workers=2)
    model = DDP(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


main()
