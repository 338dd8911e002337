"""Rank 1 has finished and destroys the group; rank 0 still reduces.

Report: https://github.com/pytorch/pytorch/issues/75097
Ranks: 2
Kind: absent
Guilty: 1
Plain: error
"""

import time

import torch
import torch.distributed as dist


def train(steps: int) -> None:
    for _ in range(steps):
        loss = torch.rand(1)
        dist.all_reduce(loss)  # HERE 0: all_reduce


dist.init_process_group("gloo")
train(steps=8 if dist.get_rank() == 0 else 6)
dist.destroy_process_group()
time.sleep(30)  # uploads its logs
