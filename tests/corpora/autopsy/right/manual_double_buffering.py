"""Rank 0 streams batches to rank 1, always two receives ahead.

Ranks: 2
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
count = 8
if dist.get_rank() == 0:
    for index in range(count):
        time.sleep(0.2)
        dist.send(torch.full((16,), float(index)), dst=1)
else:
    boxes = [torch.empty(16) for _ in range(count)]
    works = [dist.irecv(boxes[0], src=0)]
    for index in range(count):
        if index + 1 < count:
            works.append(dist.irecv(boxes[index + 1], src=0))
        works[index].wait()
        assert boxes[index][0].item() == index
dist.barrier()
dist.destroy_process_group()
