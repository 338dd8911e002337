"""Workers that stay between epochs, and an iterable dataset split by hand.

Ranks: 2
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        workers = info.num_workers if info else 1
        start = rank * workers + (info.id if info else 0)
        for index in range(start, 48, size * workers):
            yield torch.tensor([float(index)])


loader = DataLoader(Stream(), batch_size=3, num_workers=2, persistent_workers=True)
for epoch in range(2):
    for batch in loader:
        dist.all_reduce(batch)
dist.destroy_process_group()
