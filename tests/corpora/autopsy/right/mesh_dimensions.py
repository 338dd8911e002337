"""A two-dimensional mesh whose rows and columns reduce one after the other.

Ranks: 4
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
value = torch.tensor([float(dist.get_rank())])
for name in ("row", "column", "row"):
    dist.all_reduce(value, group=mesh.get_group(name))
print(dist.get_rank(), value.item())
dist.destroy_process_group()
