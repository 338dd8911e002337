"""An operation on a DTensor that needs its neighbours' shards, on one rank only.

Report: https://github.com/pytorch/pytorch/issues/123421
Ranks: 3
Kind: mismatch
Guilty: 1
Plain: hang
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
weight = distribute_tensor(torch.ones(9, 4), mesh, [Shard(0)])
for step in range(4):
    grad = torch.ones(4)
    dist.all_reduce(grad)  # HERE 0,2: all_reduce
    if dist.get_rank() == 1 and step == 2:
        whole = weight.redistribute(mesh, [Replicate()])  # HERE 1: all_gather
        print("zeros:", int((whole.to_local() == 0).sum()))
dist.destroy_process_group()
