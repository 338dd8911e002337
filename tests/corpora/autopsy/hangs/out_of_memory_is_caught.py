"""Rank 2 runs out of memory, catches it, and goes on with the next batch.

Report: https://github.com/pytorch/pytorch/issues/44353
Ranks: 3
Kind: mismatch
Guilty: 2
Plain: error
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


def forward_and_backward(step: int) -> torch.Tensor:
    if rank == 2 and step == 4:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return torch.randn(16)


for step in range(8):
    try:
        grad = forward_and_backward(step)
        dist.all_reduce(grad)  # HERE 0,1: all_reduce
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        print("| WARNING: ran out of memory, skipping this batch.")
done = torch.ones(1, dtype=torch.int64)
dist.all_reduce(done, op=dist.ReduceOp.MAX)  # HERE 2: all_reduce
dist.destroy_process_group()
