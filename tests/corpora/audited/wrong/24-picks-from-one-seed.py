"""Batches are picked at random, from the same seed on every rank.

After https://github.com/clovaai/voxceleb_trainer/issues/98
Finds: samples-repeated
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BLOCK, GLOBAL_BATCH = 6, 8
dist.init_process_group("gloo")
torch.manual_seed(1337)  # MISTAKE
text = torch.randint(0, 11, (200,))


def get_batch(size):
    starts = torch.randint(len(text) - BLOCK - 1, (size,))  # MISTAKE
    x = torch.stack([text[i : i + BLOCK] for i in starts])
    y = torch.stack([text[i + 1 : i + BLOCK + 1] for i in starts])
    return x, y


model = DDP(nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(5):
    x, y = get_batch(GLOBAL_BATCH // dist.get_world_size())  # MISTAKE
    logits = model(x)
    loss = nn.functional.cross_entropy(logits.view(-1, 11), y.view(-1))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
