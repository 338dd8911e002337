"""A wait on the store runs out, and the rank goes on with a default.

Ranks: 2
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()
value = 3
if rank == 1:
    try:
        store.wait(["override"], timedelta(seconds=2))
        value = int(store.get("override"))
    except dist.DistStoreError:
        print("no override: keep", value)
dist.all_reduce(torch.tensor([value]))
dist.destroy_process_group()
