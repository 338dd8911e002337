"""Two groups of the same ranks, entered in opposite order.

Report: https://github.com/meta-pytorch/torchrec/pull/4149
Ranks: 2
Kind: deadlock
Guilty: 0,1
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
shard = dist.new_group([0, 1])
replicate = dist.new_group([0, 1])
embeddings, dense = torch.ones(16), torch.ones(4)
for step in range(6):
    if step == 4 and rank == 1:  # a recompilation: the dense part is ready first
        dist.all_reduce(dense, group=replicate)  # HERE 1: all_reduce
        dist.all_reduce(embeddings, group=shard)
    else:
        dist.all_reduce(embeddings, group=shard)  # HERE 0: all_reduce
        dist.all_reduce(dense, group=replicate)
dist.destroy_process_group()
