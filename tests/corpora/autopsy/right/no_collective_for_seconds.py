"""All ranks compute for three seconds between two reductions.

Ranks: 3
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for _ in range(2):
    dist.all_reduce(torch.ones(8))
    time.sleep(3)
dist.barrier()
dist.destroy_process_group()
