"""DDP over uneven data without join(): rank 1 has one batch more than rank 0.

Report: https://github.com/microsoft/PyMarlin/issues/80
Ranks: 2
Kind: mismatch
Guilty: 1
Plain: hang
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(10, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = torch.zeros(1)
    for _ in range(5 + rank):
        loss = model(torch.randn(20, 10)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()  # HERE 1: all_reduce
        optimizer.step()
        seen += 20
    counts = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, seen)  # HERE 0: all_gather
    dist.destroy_process_group()


main()
