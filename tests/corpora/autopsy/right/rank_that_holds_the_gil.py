"""A long call into C keeps the interpreter's lock, so no thread of rank 1 can run.

Ranks: 2
"""

import re
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
if rank == 1:
    started = time.monotonic()
    length = 18
    while time.monotonic() - started < 3:  # backtracks exponentially
        re.match(r"(a+)+$", "a" * length + "b")
        length += 1
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
