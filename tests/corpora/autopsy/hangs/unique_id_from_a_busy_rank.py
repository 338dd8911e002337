"""The ranks read an id that rank 0 publishes later, and rank 0 waits for them first.

Report: https://github.com/pytorch/pytorch/issues/107177
Ranks: 4
Kind: deadlock
Guilty: 0
Plain: hang
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()
store.set_timeout(timedelta(minutes=30))
dist.all_reduce(torch.ones(2))
if rank != 0:
    communicator = store.get("unique_id")  # HERE 1,2,3: get
dist.barrier()  # HERE 0: barrier
if rank == 0:
    store.set("unique_id", "0xf00d")
dist.destroy_process_group()
