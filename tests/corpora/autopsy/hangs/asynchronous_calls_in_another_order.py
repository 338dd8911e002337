"""Asynchronous reductions are issued in the order in which gradients get ready.

Report: https://github.com/pytorch/pytorch/pull/141968
Ranks: 2
Kind: mismatch
Guilty: 0,1
Plain: error
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
grads = [torch.ones(1 << 10), torch.ones(1 << 12)]
if rank == 1:
    grads.reverse()
works = [dist.all_reduce(grad, async_op=True) for grad in grads]  # HERE 0,1: all_reduce
for work in works:
    work.wait()  # HERE 0,1: all_reduce
print(rank, [grad.numel() for grad in grads])
dist.destroy_process_group()
