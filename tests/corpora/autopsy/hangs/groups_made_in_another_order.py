"""Both groups are made on every rank, but rank 1 makes them in the other order.

Report: https://github.com/NVIDIA/nccl/issues/296
Ranks: 3
Kind: mismatch
Guilty: 1
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
wanted = {"data": [0, 1], "model": [0, 1, 2]}
names = sorted(wanted, reverse=rank == 1)
groups = {name: dist.new_group(wanted[name]) for name in names}  # HERE 0,1,2: new_group
dist.all_reduce(torch.ones(2), group=groups["model"])
dist.destroy_process_group()
