"""Three ranks reduce in a group while the fourth does something else.

Ranks: 4
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
trainers = dist.new_group([0, 1, 2])
if rank < 3:
    for _ in range(10):
        dist.all_reduce(torch.ones(16), group=trainers)
        time.sleep(0.1)
else:
    time.sleep(2)  # evaluates on its own
dist.barrier()
dist.destroy_process_group()
