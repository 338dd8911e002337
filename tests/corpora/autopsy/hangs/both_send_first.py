"""Two ranks exchange tensors, and both send before they receive.

Report: https://github.com/NVIDIA/nccl/issues/479
Ranks: 2
Kind: deadlock
Guilty: 0,1
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
peer = 1 - rank
for _ in range(3):
    dist.all_reduce(torch.ones(1))
mine = torch.full((1000,), float(rank))
theirs = torch.empty(1000)
dist.send(mine, peer)  # HERE 0,1: send
dist.recv(theirs, peer)
print(rank, theirs[0].item())
dist.destroy_process_group()
