"""The ranks wait for a key of the store that rank 0 sets after two seconds.

Ranks: 3
"""

import time
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    time.sleep(2)
    store.set("dataset", "/data/v7")
else:
    store.wait(["dataset"], timedelta(seconds=30))
print(rank, store.get("dataset").decode())
dist.barrier()
dist.destroy_process_group()
