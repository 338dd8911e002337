"""Gradients are bucketed by dtype, and the ranks visit the dtypes in different order.

Report: https://github.com/NVIDIA/apex/issues/19
Ranks: 2
Kind: mismatch
Guilty: 0,1
Plain: error
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
grads = [torch.ones(6), torch.ones(6, dtype=torch.float64)]
if rank == 1:
    grads.reverse()  # as a set or an old dict would
for step in range(3):
    total = torch.ones(1)
    dist.all_reduce(total)
buckets: dict[torch.dtype, list[torch.Tensor]] = {}
for grad in grads:
    buckets.setdefault(grad.dtype, []).append(grad)
for dtype, bucket in buckets.items():
    flat = torch.cat(bucket)
    dist.all_reduce(flat)  # HERE 0,1: all_reduce
    print(rank, dtype, flat.sum().item())
dist.destroy_process_group()
