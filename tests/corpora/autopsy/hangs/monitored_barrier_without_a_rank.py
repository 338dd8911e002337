"""Rank 2 has skipped the monitored barrier and is in the next reduction already.

Report: https://github.com/NVIDIA/nccl/issues/849
Ranks: 3
Kind: mismatch
Guilty: 2
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for epoch in range(3):
    correct = torch.tensor([float(rank)])
    dist.all_reduce(correct)  # HERE 2: all_reduce
    if rank == 2 and epoch == 1:
        continue  # nothing to log
    dist.monitored_barrier()  # HERE 0,1: monitored_barrier
dist.destroy_process_group()
