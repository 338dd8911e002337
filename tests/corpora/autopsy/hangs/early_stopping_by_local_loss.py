"""Each rank stops by its own validation loss, and rank 1 is satisfied first.

Report: https://github.com/Lightning-AI/pytorch-lightning/issues/379
Ranks: 2
Kind: absent
Guilty: 1
Plain: error
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(50):
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()  # HERE 0: all_reduce
        optimizer.step()
    validation_loss = 1.0 / (epoch + 1) / (rank + 1)
    if validation_loss < 0.2:
        print(f"rank {rank} stops after epoch {epoch}")
        break
