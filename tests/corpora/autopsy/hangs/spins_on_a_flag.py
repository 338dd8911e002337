"""Rank 2 spins until a flag turns true that nothing sets any more.

Report: https://github.com/instructlab/training/pull/566
Ranks: 4
Kind: apart
Guilty: 2
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
saved = torch.zeros(1)


def wait_until_saved() -> None:
    while not bool(saved):  # HERE 2: apart
        pass


for step in range(5):
    dist.all_reduce(torch.ones(4))  # HERE 0,1,3: all_reduce
    if step == 2 and rank == 2:
        wait_until_saved()
dist.destroy_process_group()
