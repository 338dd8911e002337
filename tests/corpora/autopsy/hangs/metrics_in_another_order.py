"""Both ranks log the same metrics, but in another order, and the sizes differ.

Report: https://github.com/Lightning-AI/pytorch-lightning/issues/20946
Ranks: 2
Kind: mismatch
Guilty: 0,1
Plain: error
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
totals = {"loss": torch.ones(1), "per_class": torch.ones(10)}
for _ in range(3):
    for value in totals.values():
        dist.all_reduce(value)
metrics = {"per_class": torch.ones(10)}
if rank == 0:
    metrics = {"loss": torch.ones(1)} | metrics
metrics.setdefault("loss", torch.ones(1))
for name, value in metrics.items():
    dist.all_reduce(value)  # HERE 0,1: all_reduce
    print(rank, name, value.sum().item())
dist.destroy_process_group()
