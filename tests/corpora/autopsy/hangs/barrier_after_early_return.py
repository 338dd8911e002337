"""Only rank 0 reaches the barrier in save(); the others return before it.

Report: https://github.com/EleutherAI/sparsify/pull/5
Ranks: 3
Kind: mismatch
Guilty: 0
Plain: hang
"""

import io

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
weights = torch.zeros(8)


def save() -> None:
    if rank != 0:
        return
    torch.save(weights, io.BytesIO())
    dist.barrier()  # HERE 0: barrier


for step in range(10):
    grad = torch.full((8,), float(rank + step))
    dist.all_reduce(grad)  # HERE 1,2: all_reduce
    weights -= 0.1 * grad
    if step == 4:
        save()
dist.destroy_process_group()
