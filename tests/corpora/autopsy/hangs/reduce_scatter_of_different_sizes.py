"""The last rank's flat gradient lacks the padding, so its chunks are smaller.

Report: https://github.com/NVIDIA/nccl/issues/296
Ranks: 2
Kind: mismatch
Guilty: 0,1
Plain: error
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8))
numel = 4096 if rank == 0 else 4000
flat = torch.ones(numel)
shard = torch.empty(numel // size)
dist.reduce_scatter_tensor(shard, flat)  # HERE 0,1: reduce_scatter
print(rank, shard.sum().item())
dist.barrier()
dist.destroy_process_group()
