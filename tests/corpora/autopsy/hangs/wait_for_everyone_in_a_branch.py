"""Only the ranks that print their samples wait for everyone.

Report: https://github.com/huggingface/accelerate/issues/1752
Ranks: 4
Kind: mismatch
Guilty: 0,1
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(5):
    grad = torch.ones(2)
    dist.all_reduce(grad)  # HERE 2,3: all_reduce
    if step == 3 and rank < 2:
        print("sample", grad.tolist())
        dist.barrier()  # HERE 0,1: barrier
dist.destroy_process_group()
