"""The message is sent with one tag and awaited with another.

Report: https://github.com/pytorch/PiPPy/issues/969
Ranks: 2
Kind: deadlock
Guilty: 0,1
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
box = torch.zeros(16)
for microbatch in range(3):
    if rank == 0:
        dist.send(box, dst=1, tag=microbatch)  # HERE 0: send
    else:
        dist.recv(box, src=0, tag=min(2 * microbatch, 2))  # HERE 1: recv
dist.destroy_process_group()
