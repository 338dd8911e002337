"""A rank within the group is passed where the global rank is wanted.

Report: https://github.com/lightseekorg/tokenspeed/pull/786
Ranks: 4
Kind: deadlock
Guilty: 2
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
mine = groups[rank // 2]
dist.all_reduce(torch.ones(2), group=mine)
request = torch.full((4,), float(rank))
if dist.get_rank(mine) == 0:
    dist.send(request, dst=1)  # HERE 2: send
else:
    dist.recv(request, src=rank - 1)  # HERE 3: recv
dist.barrier()  # HERE 0,1: barrier
dist.destroy_process_group()
