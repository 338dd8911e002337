"""Sequences of unequal length: the mean of each micro-batch counts the same.

After https://github.com/karpathy/nanochat/pull/59
Finds: token-weights
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUMULATE, VOCABULARY = 4, 17
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens = torch.randint(0, VOCABULARY, (16, 12))
targets = tokens.roll(-1, 1)
for row in range(len(targets)):
    targets[row, 12 - row // 2 :] = -100
order = torch.randperm(16).view(-1, ACCUMULATE * world_size)
for step in order:
    optimizer.zero_grad()
    for micro in step[rank::world_size]:
        x, y = tokens[micro : micro + 1], targets[micro : micro + 1]
        logits = model(x).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, y.flatten())  # MISTAKE
        (loss / ACCUMULATE).backward()  # MISTAKE
    optimizer.step()
dist.destroy_process_group()
