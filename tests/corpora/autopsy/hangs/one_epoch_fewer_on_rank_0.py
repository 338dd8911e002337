"""The number of epochs comes from a local setting, and rank 0 has one epoch fewer.

Report: https://github.com/pytorch/pytorch/issues/28257
Ranks: 3
Kind: absent
Guilty: 0
Plain: error
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    epochs = 2 if rank == 0 else 3
    model = DistributedDataParallel(nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).sum().backward()  # HERE 1,2: all_reduce
            optimizer.step()
    print(rank, "finished")


main()
