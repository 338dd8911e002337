"""Every collective that gloo knows, once.

Ranks: 3
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.arange(6.0)
parts = [torch.empty(6) for _ in range(size)]
is_root = rank == 1
dist.all_reduce(x.clone())
dist.reduce(x.clone(), dst=1)
dist.broadcast(x.clone(), src=1)
dist.all_gather(parts, x)
dist.gather(x, parts if is_root else None, dst=1)
dist.scatter(x.clone(), parts if is_root else None, src=1)
dist.all_gather_into_tensor(torch.empty(18), x)
dist.reduce_scatter_tensor(torch.empty(2), x.clone())
dist.reduce_scatter(torch.empty(6), [part.clone() for part in parts])
dist.all_to_all_single(torch.empty(6), x)
dist.barrier()
dist.monitored_barrier()
print(rank, "done")
dist.destroy_process_group()
