"""Workers draw from numpy generators seeded by rank and worker."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info


class Noisy(Dataset):
    def __init__(self, count):
        self.values = torch.linspace(0, 1, count)
        self.random = None

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        noise = self.random.normal(size=4)
        return self.values[index] + torch.from_numpy(noise).float()


def seed_worker(worker_id):
    dataset = get_worker_info().dataset
    dataset.random = np.random.default_rng([dist.get_rank(), worker_id])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Noisy(32)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(
        dataset,
        batch_size=8 // dist.get_world_size(),
        sampler=sampler,
        num_workers=2,
        worker_init_fn=seed_worker,
    )
    model = DDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
    dist.destroy_process_group()


main()
