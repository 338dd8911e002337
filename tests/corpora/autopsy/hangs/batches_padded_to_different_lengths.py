"""Batches are padded to the longest text on the rank, and then reduced.

Report: https://github.com/EleutherAI/bergson/pull/227
Ranks: 2
Kind: mismatch
Guilty: 0,1
Plain: error
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
texts = [[(5, 7), (5, 6)], [(4, 4), (3, 9)]]
for lengths in zip(*texts, strict=True):
    padded = torch.zeros(len(lengths), max(lengths[rank]))
    padded += rank
    dist.all_reduce(padded)  # HERE 0,1: all_reduce
    print(rank, tuple(padded.shape))
dist.destroy_process_group()
