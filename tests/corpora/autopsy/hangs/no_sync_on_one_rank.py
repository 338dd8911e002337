"""The last stage's condition is never true, so rank 1 never reduces its gradients.

Report: https://github.com/huggingface/picotron/pull/5
Ranks: 2
Kind: mismatch
Guilty: 1
Plain: hang
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
warm_up = 1 - rank
for step in range(2):
    for micro in range(3):
        last = micro == 2 if warm_up else False
        model.require_backward_grad_sync = last
        model(torch.randn(4, 8)).sum().backward()  # HERE 0: all_reduce
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()  # HERE 1: barrier
dist.destroy_process_group()
