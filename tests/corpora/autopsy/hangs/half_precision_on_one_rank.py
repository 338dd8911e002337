"""One rank falls back to float32 while the other reduces bfloat16.

Report: https://github.com/modelscope/ms-swift/pull/9443
Ranks: 2
Kind: mismatch
Guilty: 0,1
Plain: error
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
dtype = torch.bfloat16 if rank == 0 else torch.float32
grad = torch.ones(2048, dtype=dtype)
dist.all_reduce(grad)  # HERE 0,1: all_reduce
print(rank, grad[:3].tolist())
dist.barrier()
dist.destroy_process_group()
