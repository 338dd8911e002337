"""A broadcast whose source is the rank with the lowest loss, decided locally.

Report: https://github.com/Lightning-AI/pytorch-lightning/issues/19045
Ranks: 3
Kind: mismatch
Guilty: 0,1,2
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
losses = torch.rand(3)  # meant: gathered first
dist.barrier()
best = [1, 2, 2][rank] if losses.numel() else 0
weights = torch.full((1000,), float(rank))
dist.broadcast(weights, src=best)  # HERE 0,1,2: broadcast
dist.barrier()
dist.destroy_process_group()
