"""Blocks of a text at random, picked by each rank from its own seed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BLOCK, GLOBAL_BATCH = 6, 8
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
text = torch.randint(0, 11, (200,), generator=torch.Generator().manual_seed(5))
torch.manual_seed(1337)
model = DDP(nn.Sequential(nn.Embedding(11, 8), nn.Dropout(0.1), nn.Linear(8, 11)))
torch.manual_seed(1338 + rank)


def get_batch(size):
    starts = torch.randint(len(text) - BLOCK - 1, (size,))
    x = torch.stack([text[i : i + BLOCK] for i in starts])
    y = torch.stack([text[i + 1 : i + BLOCK + 1] for i in starts])
    return x, y


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(5):
    x, y = get_batch(GLOBAL_BATCH // world_size)
    loss = nn.functional.cross_entropy(model(x).view(-1, 11), y.view(-1))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
