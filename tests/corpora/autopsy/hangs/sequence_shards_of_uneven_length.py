"""Each rank gathers its shard into one tensor, and one shard is a row longer.

Report: https://github.com/aurekaresearch/OpenDDE/issues/23
Ranks: 2
Kind: mismatch
Guilty: 0,1
Plain: error
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
dist.barrier()
rows = (359, 360)[rank]
pair = torch.ones(rows, 16)
whole = torch.empty(size * rows, 16)
dist.all_gather_into_tensor(whole, pair)  # HERE 0,1: all_gather
print(rank, whole.sum().item())
dist.barrier()
dist.destroy_process_group()
