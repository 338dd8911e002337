"""Two threads share a group, and their calls interleave differently on each rank.

Report: https://github.com/pytorch/pytorch/issues/175145
Ranks: 2
Kind: mismatch
Guilty: 0,1
Plain: hang
"""

import threading
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()


def report() -> None:
    time.sleep(0.5 if rank == 0 else 1.5)
    dist.broadcast(torch.ones(1), src=0)  # HERE 0,1: broadcast


thread = threading.Thread(target=report, daemon=True)
thread.start()
time.sleep(1.0)
dist.all_reduce(torch.ones(100))  # HERE 0,1: all_reduce
thread.join()
dist.destroy_process_group()
