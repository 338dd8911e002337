"""A posted receive is forgotten and takes the message that the next one waits for.

Report: https://github.com/pytorch/pytorch/issues/75795
Ranks: 2
Kind: deadlock
Guilty: 1
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
for step in range(3):
    if rank == 0:
        dist.send(torch.full((4,), float(step)), dst=1)
    else:
        prefetched = torch.empty(4)
        dist.irecv(prefetched, src=0)
        current = torch.empty(4)
        dist.recv(current, src=0)  # HERE 1: recv
dist.barrier()  # HERE 0: barrier
dist.destroy_process_group()
