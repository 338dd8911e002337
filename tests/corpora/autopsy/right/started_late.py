"""Rank 1 imports for three seconds before it joins; rank 0 waits for it in init.

Ranks: 2
"""

import os
import time

import torch
import torch.distributed as dist

if os.environ["RANK"] == "1":
    time.sleep(3)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
