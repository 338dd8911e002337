"""Rank 1 leaves early, and its exit handler waits in a barrier for the others.

Report: https://github.com/ai2cm/ace/pull/1067
Ranks: 2
Kind: mismatch
Guilty: 1
Plain: hang
"""

import atexit
import sys

import torch
import torch.distributed as dist


def shutdown() -> None:
    dist.barrier()  # HERE 1: barrier
    dist.destroy_process_group()


dist.init_process_group("gloo")
atexit.register(shutdown)
for step in range(10):
    if dist.get_rank() == 1 and step == 6:
        print("the local budget is used up")
        sys.exit(0)
    dist.all_reduce(torch.ones(4))  # HERE 0: all_reduce
