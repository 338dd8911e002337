"""Rank 1 waits for a file that rank 0 writes after two seconds.

Ranks: 2
"""

import os
import tempfile
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
name: list = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(name, src=0)
path = os.path.join(name[0], "vocabulary.txt")
if rank == 0:
    time.sleep(2)
    with open(path, "w") as file:
        file.write("a b c")
else:
    while not os.path.exists(path):
        time.sleep(0.05)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
