"""Two halves train at different speeds and meet only at the end.

Ranks: 4
"""

import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
mine = rank // 2
for _ in range((20, 4)[mine]):
    dist.all_reduce(torch.ones(4), group=halves[mine])
    time.sleep((0.02, 0.6)[mine])
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
