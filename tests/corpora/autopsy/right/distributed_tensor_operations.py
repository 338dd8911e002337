"""Sharded and replicated tensors are multiplied, redistributed and gathered.

Ranks: 3
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
a = distribute_tensor(torch.randn(9, 6), mesh, [Shard(0)])
b = distribute_tensor(torch.randn(6, 5), mesh, [Replicate()])
product = a @ b
columns = product.redistribute(mesh, [Shard(1)])
print(dist.get_rank(), tuple(columns.to_local().shape))
assert torch.equal(product.full_tensor(), columns.full_tensor())
dist.barrier()
dist.destroy_process_group()
