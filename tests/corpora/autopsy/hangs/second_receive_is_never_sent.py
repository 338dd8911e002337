"""Rank 0 posts two receives and waits for both; rank 1 sends once and moves on.

Report: https://github.com/pytorch/pytorch/issues/109401
Ranks: 2
Kind: deadlock
Guilty: 0
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
forward, backward = torch.zeros(4), torch.zeros(4)
dist.barrier()
if rank == 0:
    works = [dist.irecv(box, 1) for box in (forward, backward)]  # HERE 0: recv
    for work in works:
        work.wait()  # HERE 0: recv
else:
    dist.isend(torch.ones(4), 0).wait()
dist.barrier()  # HERE 1: barrier
dist.destroy_process_group()
