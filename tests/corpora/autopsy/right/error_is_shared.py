"""A rank fails, tells the others with the next reduction, and all leave in order.

Ranks: 2
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(10):
    failed = torch.zeros(1)
    try:
        if rank == 1 and step == 6:
            raise OSError("the disk is full")
    except OSError as error:
        print(error)
        failed += 1
    dist.all_reduce(failed)
    if failed.item():
        break
dist.destroy_process_group()
