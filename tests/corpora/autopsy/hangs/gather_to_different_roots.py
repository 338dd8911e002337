"""Each rank gathers to the rank that it takes for the main one.

Report: https://github.com/EleutherAI/sparsify/issues/69
Ranks: 2
Kind: mismatch
Guilty: 0,1
Plain: hang
"""

import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
dist.barrier()
main_rank = int(os.environ["LOCAL_RANK"])  # meant: 0
info = torch.tensor([float(rank)])
parts = [torch.zeros(1) for _ in range(size)] if rank == main_rank else None
dist.gather(info, parts, dst=main_rank)  # HERE 0,1: gather
dist.barrier()
dist.destroy_process_group()
