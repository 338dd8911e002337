"""The norm is reduced for clipping only where the local norm is large.

Report: https://github.com/ecmwf/WeatherGenerator/issues/2724
Ranks: 3
Kind: mismatch
Guilty: 1
Plain: error
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(6):
    grad = torch.ones(9)
    if rank == 1 and step == 4:
        grad *= 100.0
    if grad.norm() > 10.0:
        total = grad.square().sum().reshape(1)
        dist.all_reduce(total)  # HERE 1: all_reduce
        grad *= 10.0 / total.sqrt()
    dist.reduce_scatter_tensor(torch.empty(3), grad)  # HERE 0,2: reduce_scatter
dist.destroy_process_group()
