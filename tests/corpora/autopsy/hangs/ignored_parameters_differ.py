"""DDP is told to ignore a parameter on rank 0 that it has to send on rank 1.

Report: https://github.com/pytorch/pytorch/issues/68803
Ranks: 2
Kind: mismatch
Guilty: 0,1
Plain: hang
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
ignored = ["1.weight"] if rank == 0 else []
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
dist.barrier()
model = DistributedDataParallel(model)  # HERE 0,1: all_gather
model(torch.randn(2, 4)).sum().backward()
dist.destroy_process_group()
