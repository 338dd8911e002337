"""Workers are seeded by their number, which starts at 0 on each rank.

After https://github.com/ecmwf/anemoi-core/issues/595
Finds: same-random-numbers
"""

import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SEED = 2024


class Flipped(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return row.flip(0) if random.random() < 0.5 else row


def seed_worker(worker_id):
    random.seed(SEED + worker_id)  # MISTAKE


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(SEED)
    dataset = Flipped(torch.randn(48, 6))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(
        dataset,
        batch_size=12 // dist.get_world_size(),
        sampler=sampler,
        num_workers=2,
        worker_init_fn=seed_worker,  # MISTAKE
    )
    model = DDP(nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()
    dist.destroy_process_group()


main()
