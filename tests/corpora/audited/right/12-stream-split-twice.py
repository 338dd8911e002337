"""An iterable dataset that is split by rank and by worker."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Records(IterableDataset):
    def __init__(self, count, rank, world_size):
        self.count, self.rank, self.world_size = count, rank, world_size

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        first, step = self.rank * workers + worker, self.world_size * workers
        for number in range(first, self.count, step):
            generator = torch.Generator().manual_seed(number)
            yield torch.randn(5, generator=generator)


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
loader = DataLoader(Records(32, rank, world_size), 8 // world_size, num_workers=2)
torch.manual_seed(0)
model = DDP(nn.Linear(5, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(batch), batch).backward()
    optimizer.step()
dist.destroy_process_group()
