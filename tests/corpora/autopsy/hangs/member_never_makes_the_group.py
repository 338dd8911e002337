"""Rank 3 is a member of the group of odd ranks, but skips the call that makes it.

Report: https://github.com/pytorch/pytorch/issues/25390
Ranks: 4
Kind: absent
Guilty: 3
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(4))
even = dist.new_group([0, 2])
if rank < 3:  # meant: every rank
    odd = dist.new_group([1, 3])  # HERE 1: new_group
dist.barrier()  # HERE 0,2,3: barrier
dist.destroy_process_group()
