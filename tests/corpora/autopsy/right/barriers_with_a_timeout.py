"""Monitored barriers with a timeout that's long enough for the slowest rank.

Ranks: 3
"""

import time
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
for _ in range(2):
    time.sleep(0.8 * rank)
    dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)
dist.barrier()
dist.destroy_process_group()
