"""The ranks build different models: rank 2 has one layer more to be broadcast.

Report: https://github.com/pomonam/kronfluence/issues/41
Ranks: 3
Kind: mismatch
Guilty: 2
Plain: hang
"""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
labels = ["cat", "dog", "owl"] if rank == 2 else ["cat", "dog"]
model = nn.Sequential(*(nn.Linear(8, 8) for _ in labels))
dist.barrier()
for parameter in model.parameters():
    dist.broadcast(parameter.data, src=0)  # HERE 2: broadcast
model(torch.randn(4, 8)).sum().backward()
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)  # HERE 0,1: all_reduce
dist.destroy_process_group()
