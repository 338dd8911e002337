"""Each rank loads with two worker processes, and some samples take long.

Ranks: 2
"""

import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Images(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 13:
            time.sleep(2)
        return torch.full((3, 8, 8), float(index))


dist.init_process_group("gloo")
images = Images()
loader = DataLoader(
    images, batch_size=4, num_workers=2, sampler=DistributedSampler(images)
)
for epoch in range(2):
    for batch in loader:
        mean = batch.mean().reshape(1)
        dist.all_reduce(mean)
dist.destroy_process_group()
