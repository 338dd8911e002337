"""Rank 2 fails; the finally block synchronises before it destroys the group.

Report: https://github.com/pytorch/torchtitan/pull/1342
Ranks: 3
Kind: mismatch
Guilty: 2
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
try:
    for step in range(8):
        if rank == 2 and step == 5:
            raise FileNotFoundError("shard-0005.bin")
        dist.all_reduce(torch.ones(16))  # HERE 0,1: all_reduce
finally:
    dist.barrier()  # HERE 2: barrier
    dist.destroy_process_group()
