"""Rank r does r times the work of rank 1; nobody is ever more than a step ahead.

Ranks: 4
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = dist.get_rank()
x = torch.randn(300, 300)
for _ in range(5):
    for _ in range(20 * rank):
        x = torch.tanh(x @ x / 300)
    loss = x.mean().reshape(1)
    dist.all_reduce(loss)
dist.destroy_process_group()
