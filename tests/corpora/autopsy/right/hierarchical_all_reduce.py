"""Reduce within a node, between the leaders, and broadcast within the node.

Ranks: 4
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
leaders = dist.new_group([0, 2])
node, leader = nodes[rank // 2], rank // 2 * 2
value = torch.tensor([float(rank + 1)])
for _ in range(3):
    dist.reduce(value, dst=leader, group=node)
    if rank == leader:
        dist.all_reduce(value, group=leaders)
    dist.broadcast(value, src=leader, group=node)
print(rank, value.item())
dist.destroy_process_group()
