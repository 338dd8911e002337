"""Stage 2 expects its skip connection from stage 1, but stage 0 sends it.

Report: https://github.com/pytorch/PiPPy/issues/969
Ranks: 3
Kind: deadlock
Guilty: 0,2
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
box = torch.zeros(4)
if rank == 0:
    dist.send(box, dst=1)
    dist.send(box, dst=2)  # HERE 0: send
elif rank == 1:
    dist.recv(box, src=0)
    dist.send(box, dst=2)
else:
    dist.recv(box, src=1)
    dist.recv(box, src=1)  # HERE 2: recv
dist.barrier()  # HERE 1: barrier
dist.destroy_process_group()
