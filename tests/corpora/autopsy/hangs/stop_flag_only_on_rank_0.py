"""Rank 0 decides to stop and tells nobody; it waits at the end, the others train on.

Report: https://github.com/ultralytics/yolov5/pull/8345
Ranks: 4
Kind: mismatch
Guilty: 0
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
best, stale = float("inf"), 0
for epoch in range(20):
    fitness = torch.tensor([1.0 + rank])
    dist.all_reduce(fitness)  # HERE 1,2,3: all_reduce
    if rank == 0:
        stale = stale + 1 if fitness.item() >= best else 0
        best = min(best, fitness.item())
        if stale > 2:
            break
dist.barrier()  # HERE 0: barrier
dist.destroy_process_group()
