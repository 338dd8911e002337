"""Rank 0 tokenises and caches; the others go through the same block afterwards.

Ranks: 2
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

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


with main_process_first():
    time.sleep(1.5 if rank == 0 else 0.1)
    print(rank, "has the data")
dist.barrier()
dist.destroy_process_group()
