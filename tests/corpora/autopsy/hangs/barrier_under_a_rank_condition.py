"""Rank 3 doesn't take part in the barrier and runs to its end.

Report: https://github.com/pytorch/pytorch/issues/138322
Ranks: 4
Kind: absent
Guilty: 3
Plain: error
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(4):
    dist.all_reduce(torch.ones(8))
if rank != 3:
    dist.barrier()  # HERE 0,1,2: barrier
print(f"{rank} done")
