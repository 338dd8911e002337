"""Pairs are made by their members only, with local synchronisation.

Ranks: 4
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
members = [0, 1] if rank < 2 else [2, 3]
pair = dist.new_group(members, use_local_synchronization=True)
value = torch.tensor([float(rank)])
dist.all_reduce(value, group=pair)
dist.broadcast(value, src=members[1], group=pair)
dist.barrier()
dist.destroy_process_group()
