"""Even ranks send and then receive, odd ones the other way around.

Ranks: 4
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
for distance in (1, 3):
    peer = rank ^ distance
    mine, theirs = torch.full((100,), float(rank)), torch.empty(100)
    if rank < peer:
        dist.send(mine, peer)
        dist.recv(theirs, peer)
    else:
        dist.recv(theirs, peer)
        dist.send(mine, peer)
    assert theirs[0].item() == peer
dist.destroy_process_group()
