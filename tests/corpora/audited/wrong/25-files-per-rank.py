"""Whole files are dealt out by integer division, and some are left over.

After https://github.com/NVIDIA-NeMo/Speech/pull/4553
Finds: samples-lost
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

NUM_FILES, PER_FILE = 9, 4


def read_file(number):
    generator = torch.Generator().manual_seed(number)
    return TensorDataset(torch.randn(PER_FILE, 3, generator=generator))


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    per_rank = NUM_FILES // world_size  # MISTAKE
    files = range(rank * per_rank, (rank + 1) * per_rank)  # MISTAKE
    dataset = ConcatDataset([read_file(number) for number in files])
    size = 8 // world_size
    loader = DataLoader(dataset, batch_size=size, shuffle=True)  # MISTAKE
    torch.manual_seed(0)
    model = DDP(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        for (x,) in loader:
            loss = nn.functional.smooth_l1_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


main()
