"""Rank 0 waits for a key of every other rank, and rank 2 sets a misspelt one.

Report: https://github.com/pytorch/pytorch/issues/53840
Ranks: 3
Kind: deadlock
Guilty: 0
Plain: hang
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
dist.all_reduce(torch.ones(1))
if rank == 0:
    keys = [f"ready/{other}" for other in range(1, size)]
    store.wait(keys, timedelta(minutes=30))  # HERE 0: wait
else:
    store.set(f"ready/{rank}" if rank == 1 else f"ready{rank}", "yes")
dist.barrier()  # HERE 1,2: barrier
dist.destroy_process_group()
