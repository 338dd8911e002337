"""Rank 0 sends five tensors in a batch, and rank 1 takes four of them.

Report: https://github.com/pytorch/pytorch/pull/117682
Ranks: 2
Kind: deadlock
Guilty: 0
Plain: hang
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
tensors = [torch.full((3,), float(i)) for i in range(5)]
if rank == 0:
    ops = [dist.P2POp(dist.isend, tensor, 1) for tensor in tensors]
else:
    ops = [dist.P2POp(dist.irecv, tensor, 0) for tensor in tensors[:4]]
for work in dist.batch_isend_irecv(ops):  # HERE 0: send
    work.wait()  # HERE 0: send
loss = torch.ones(1)
dist.broadcast(loss, src=1)  # HERE 1: broadcast
dist.destroy_process_group()
