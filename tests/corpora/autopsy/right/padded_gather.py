"""Ranks gather tensors of different lengths: first the lengths, then padded rows.

Ranks: 3
"""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mine = torch.full((3 + rank, 2), float(rank))
lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
dist.all_gather(lengths, torch.tensor([len(mine)]))
longest = int(max(lengths))
padded = torch.zeros(longest, 2)
padded[: len(mine)] = mine
parts = [torch.empty(longest, 2) for _ in range(size)]
dist.all_gather(parts, padded)
rows = torch.cat([part[:n] for part, n in zip(parts, lengths, strict=True)])
print(rank, tuple(rows.shape))
dist.destroy_process_group()
