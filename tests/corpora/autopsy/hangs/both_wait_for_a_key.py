"""Each rank waits for the other's key before it sets its own.

Report: https://github.com/pytorch/pytorch/issues/67972
Ranks: 2
Kind: deadlock
Guilty: 0,1
Plain: hang
"""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
store = dist.distributed_c10d._get_default_store()
store.set_timeout(timedelta(minutes=30))
weights = torch.full((4,), float(rank))
dist.broadcast(weights, src=0)
theirs = store.get(f"version/{1 - rank}")  # HERE 0,1: get
store.set(f"version/{rank}", "7")
print(rank, theirs)
dist.destroy_process_group()
