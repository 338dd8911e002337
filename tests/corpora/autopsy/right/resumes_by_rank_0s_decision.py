"""Rank 0 looks for a checkpoint and broadcasts whether there is one.

Ranks: 3
"""

import os
import tempfile

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
state: list = [None]
if rank == 0:
    path = os.path.join(tempfile.mkdtemp(), "last.pt")
    torch.save({"step": 7, "weights": torch.ones(4)}, path)
    state = [torch.load(path) if os.path.exists(path) else None]
dist.broadcast_object_list(state, src=0)
step = state[0]["step"] if state[0] else 0
for _ in range(step, 10):
    dist.all_reduce(torch.ones(4))
print(rank, "started at", step)
dist.destroy_process_group()
