"""Every worker of every rank seeds numpy with the same number.

After https://github.com/pytorch/pytorch/issues/5059
Finds: same-random-numbers
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Cropped(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        first = np.random.randint(0, 5)
        return self.rows[index, first : first + 4]


def init(worker):
    np.random.seed(1234)  # MISTAKE


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    dataset = Cropped(torch.arange(320.0).view(40, 8) / 320)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(
        dataset,
        batch_size=8 // dist.get_world_size(),
        sampler=sampler,
        num_workers=2,
        worker_init_fn=init,  # MISTAKE
    )
    model = DDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x).backward()
            optimizer.step()
    dist.destroy_process_group()


main()
