"""A random number, drawn with each rank's own seed, decides whether to reduce.

Report: https://github.com/Lightning-AI/pytorch-lightning/issues/9851
Ranks: 2
Kind: mismatch
Guilty: 0,1
Plain: hang
"""

import random

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
random.seed(rank)
for step in range(20):
    grad = torch.ones(4)
    dist.all_reduce(grad)  # HERE 0: all_reduce
    if random.random() < 0.3:
        mixed = torch.ones(64)
        dist.broadcast(mixed, src=0)  # HERE 1: broadcast
dist.destroy_process_group()
