"""The last stage has sent its loss back before anybody asks for it.

Report: https://github.com/pytorch/PiPPy/issues/1064
Ranks: 4
Kind: deadlock
Guilty: 3
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
activation = torch.ones(4, 4)
dist.broadcast(activation, src=0)
if rank > 0:
    dist.recv(activation, src=rank - 1)
if rank < size - 1:
    dist.send(activation, dst=rank + 1)
if rank == size - 1:
    dist.send(activation.sum().reshape(1), dst=0)  # HERE 3: send
dist.barrier()  # HERE 0,1,2: barrier
dist.destroy_process_group()
