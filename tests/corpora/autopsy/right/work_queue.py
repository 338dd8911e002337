"""Rank 0 hands out tasks until there are none, and ends each worker with a -1.

Ranks: 3
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
message = torch.zeros(1, dtype=torch.int64)
if rank == 0:
    tasks = list(range(8))
    workers = size - 1
    while workers:
        worker = dist.recv(message)
        task = tasks.pop() if tasks else -1
        workers -= task == -1
        dist.send(torch.tensor([task]), dst=worker)
else:
    while True:
        dist.send(torch.tensor([rank]), dst=0)
        dist.recv(message, src=0)
        if message.item() == -1:
            break
        time.sleep(0.05 * message.item())
dist.destroy_process_group()
