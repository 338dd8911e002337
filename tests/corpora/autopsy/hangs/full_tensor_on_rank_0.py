"""full_tensor() gathers a sharded tensor, and only rank 0 calls it.

Report: https://github.com/areal-project/AReaL/pull/187
Ranks: 2
Kind: mismatch
Guilty: 0
Plain: hang
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
weight = distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh, [Shard(0)])
norm = weight.norm().full_tensor()
if dist.get_rank() == 0:
    print(norm.item(), weight.full_tensor().sum().item())  # HERE 0: all_gather
dist.barrier()  # HERE 1: barrier
dist.destroy_process_group()
