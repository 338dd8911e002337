"""all_gather of predictions whose first dimension differs between ranks.

Report: https://github.com/Lightning-AI/pytorch-lightning/issues/7773
Ranks: 3
Kind: mismatch
Guilty: 2
Plain: error
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
dist.all_reduce(torch.ones(4))
rows = 5 if rank == 2 else 8  # the last batch is smaller
predictions = torch.full((rows, 4), float(rank))
everything = [torch.empty(rows, 4) for _ in range(size)]
dist.all_gather(everything, predictions)  # HERE 0,1,2: all_gather
print(rank, torch.cat(everything).mean().item())
dist.barrier()
dist.destroy_process_group()
