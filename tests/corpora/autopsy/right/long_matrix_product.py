"""Rank 0 multiplies large matrices for seconds while the others are in a barrier.

Ranks: 4
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.set_num_threads(1)
if dist.get_rank() == 0:
    started = time.monotonic()
    matrix = torch.randn(1200, 1200)
    while time.monotonic() - started < 3:
        matrix = torch.tanh(matrix @ matrix)
dist.barrier()
dist.destroy_process_group()
