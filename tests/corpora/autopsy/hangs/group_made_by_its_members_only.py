"""A group made by its members only: from then on, rank 2 counts its groups differently.

Report: https://github.com/pytorch/pytorch/issues/81291
Ranks: 3
Kind: deadlock
Guilty: 2
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(3):
    dist.all_reduce(torch.ones(4))
if rank in (0, 1):
    pair = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4), group=pair)
everyone = dist.new_group([0, 1, 2])  # HERE 0,1,2: new_group
dist.all_reduce(torch.ones(4), group=everyone)  # HERE 2: all_reduce
dist.destroy_process_group()
