"""Rank 2 has twice as many batches as the others, which go on to the final barrier.

Report: https://github.com/deepspeedai/DeepSpeed/issues/2223
Ranks: 3
Kind: mismatch
Guilty: 2
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
batches = [torch.randn(5, 3) for _ in range((4, 4, 8)[rank])]
weights = torch.zeros(3)
for batch in batches:
    grad = batch.mean(0)
    dist.all_reduce(grad)  # HERE 2: all_reduce
    weights -= 0.1 * grad / dist.get_world_size()
dist.barrier()  # HERE 0,1: barrier
print(rank, weights.tolist())
dist.destroy_process_group()
