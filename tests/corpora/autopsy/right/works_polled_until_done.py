"""An asynchronous broadcast is polled with is_completed() instead of wait().

Ranks: 2
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(3):
    if rank == 0:
        time.sleep(1.0)
    work = dist.broadcast(torch.ones(1000), src=0, async_op=True)
    polls = 0
    while not work.is_completed():
        time.sleep(0.01)
        polls += 1
    work.wait()
    print(rank, step, polls)
dist.destroy_process_group()
