"""Ranks count themselves in the store, and poll until all have come.

Ranks: 4
"""

import time

import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
for round_ in range(2):
    time.sleep(0.4 * ((rank + round_) % size))
    store.add(f"here/{round_}", 1)
    while store.add(f"here/{round_}", 0) < size:
        time.sleep(0.02)
print(rank, "passed")
dist.destroy_process_group()
