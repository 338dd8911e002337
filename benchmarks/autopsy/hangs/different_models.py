"""The ranks wrap different models: rank 2 has built one layer more.

Report: https://github.com/pomonam/kronfluence/issues/41
Ranks: 3
Kind: mismatch
Guilty: 2
Plain: error
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
classes = len({"cat", "dog", "owl"} if rank == 2 else {"cat", "dog"})
layers = [nn.Linear(8, 8) for _ in range(classes)]
dist.barrier()
model = DistributedDataParallel(nn.Sequential(*layers))  # HERE 0,1,2: all_gather
model(torch.randn(4, 8)).sum().backward()
dist.destroy_process_group()
