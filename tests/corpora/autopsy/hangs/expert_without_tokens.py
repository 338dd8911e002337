"""A rank whose experts got no tokens skips the all-to-all that combines the outputs.

Report: https://github.com/sgl-project/sgl-kernel-npu/issues/69
Ranks: 4
Kind: mismatch
Guilty: 3
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
router = torch.tensor([3, 2, 3, 0])  # tokens for the experts of each rank
counts = torch.empty(size, dtype=torch.int64)
dist.all_to_all_single(counts, router.clone())
tokens = int(counts.sum())
hidden = torch.ones(size)
if tokens > 0:
    combined = torch.empty(size)
    dist.all_to_all_single(combined, hidden)  # HERE 0,1,2: all_to_all
    hidden = combined
dist.all_reduce(hidden)  # HERE 3: all_reduce
dist.destroy_process_group()
