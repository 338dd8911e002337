"""Rank 0 prepares the data first, but waits twice where the others wait once.

Report: https://github.com/huggingface/accelerate/issues/1303
Ranks: 3
Kind: mismatch
Guilty: 0
Plain: hang
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()


@contextmanager
def main_process_first() -> Iterator[None]:
    if rank != 0:
        dist.barrier()
    yield
    if rank == 0:
        dist.barrier()
    if rank == 0:
        dist.barrier()  # HERE 0: barrier


for _ in range(2):
    dist.all_reduce(torch.ones(1))
with main_process_first():
    tokens = list(range(10))
dist.all_reduce(torch.ones(1))  # HERE 1,2: all_reduce
dist.destroy_process_group()
