"""After the last barrier, the ranks destroy the group and end seconds apart.

Ranks: 3
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(4))
dist.barrier()
time.sleep((2.0, 0.0, 1.0)[rank])
dist.destroy_process_group()
time.sleep((0.0, 1.5, 0.5)[rank])
print(rank, "ends")
