"""An iterable dataset is split by rank, but not by worker.

After https://github.com/vahidk/tfrecord/issues/78
Finds: samples-repeated
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class Records(IterableDataset):
    def __init__(self, count, rank, world_size):
        self.mine = range(rank, count, world_size)

    def __iter__(self):
        for number in self.mine:  # MISTAKE
            generator = torch.Generator().manual_seed(number)
            yield torch.randn(5, generator=generator)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dataset = Records(32, rank, world_size)
    size = 8 // world_size
    loader = DataLoader(dataset, batch_size=size, num_workers=2)  # MISTAKE
    torch.manual_seed(0)
    model = DDP(nn.Linear(5, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()
    dist.destroy_process_group()


main()
