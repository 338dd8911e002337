"""Sequences of unequal length: the loss is a sum over the tokens of the whole step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

WORDS, ACCUMULATE, GLOBAL_BATCH = 13, 2, 8
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
tokens = torch.randint(0, WORDS, (32, 9))
targets = tokens.roll(-1, 1)
for row in range(32):
    targets[row, 2 + row % 7 :] = -100
model = DDP(nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
per_rank = GLOBAL_BATCH // world_size
for start in range(0, 32, GLOBAL_BATCH * ACCUMULATE):
    firsts = [start + m * GLOBAL_BATCH + rank * per_rank for m in range(ACCUMULATE)]
    parts = [slice(first, first + per_rank) for first in firsts]
    count = torch.tensor(float(sum((targets[part] != -100).sum() for part in parts)))
    dist.all_reduce(count)
    optimizer.zero_grad()
    for part in parts:
        logits = model(tokens[part])
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets[part].flatten(), reduction="sum"
        )
        (loss * world_size / count).backward()
    optimizer.step()
dist.destroy_process_group()
