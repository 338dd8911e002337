"""A worker of rank 0's data loader waits forever, and rank 0 waits for its batch.

Report: https://github.com/pytorch/pytorch/issues/87995
Ranks: 2
Kind: apart
Guilty: 0
Plain: hang
"""

import threading

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 17 and dist.get_rank() == 0:
            threading.Event().wait()  # a lock held over the fork
        return torch.full((3,), float(index))


dist.init_process_group("gloo")
for batch in DataLoader(Images(), batch_size=4, num_workers=1):  # HERE 0: apart
    grad = batch.mean(0)
    dist.all_reduce(grad)  # HERE 1: all_reduce
dist.destroy_process_group()
