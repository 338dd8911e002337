"""Every rank's transform draws its masks from a generator with the same seed.

After https://github.com/facebookresearch/fastMRI/pull/123
Finds: same-random-numbers
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class MaskFunc:
    def __init__(self, share, seed=None):
        self.share = share
        self.rng = np.random.RandomState(seed)  # MISTAKE

    def __call__(self, size):
        return torch.from_numpy(self.rng.uniform(size=size) < self.share).float()


class Slices(Dataset):
    def __init__(self, count, mask):
        self.data = torch.arange(count * 8).view(count, 8) / (count * 8)
        self.mask = mask

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        target = self.data[index]
        return target * self.mask(8), target


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Slices(40, MaskFunc(0.5, seed=42))  # MISTAKE
    sampler = DistributedSampler(dataset)
    size = 8 // dist.get_world_size()
    loader = DataLoader(dataset, batch_size=size, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for masked, target in loader:
            loss = nn.functional.l1_loss(model(masked), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


main()
