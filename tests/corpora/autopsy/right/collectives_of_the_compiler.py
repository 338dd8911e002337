"""Functional collectives return tensors that are awaited when they are used.

Ranks: 2
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo")
group = dist.group.WORLD
x = torch.ones(8, requires_grad=True)
summed = functional.all_reduce(x.detach(), "sum", group)
gathered = functional.all_gather_tensor(x.detach(), 0, group)
scattered = functional.reduce_scatter_tensor(gathered, "sum", 0, group)
print(summed.sum().item(), gathered.shape, scattered.sum().item())
dist.destroy_process_group()
