"""Each rank decides by its own clock when to save, and the clocks differ a little.

Report: https://github.com/Lightning-AI/pytorch-lightning/issues/6286
Ranks: 2
Kind: mismatch
Guilty: 0
Plain: hang
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
last = time.monotonic() - (0.25 if rank == 0 else 0.0)
for step in range(40):
    time.sleep(0.1)
    dist.all_reduce(torch.ones(16))  # HERE 1: all_reduce
    if time.monotonic() - last > 1.0:
        last = time.monotonic()
        state = [torch.empty(16) for _ in range(2)]
        dist.all_gather(state, torch.ones(16))  # HERE 0: all_gather
dist.destroy_process_group()
