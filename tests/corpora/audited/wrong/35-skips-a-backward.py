"""A rank whose batch has nothing to learn from goes on without backward().

After https://github.com/NVIDIA-NeMo/Automodel/pull/2468
Finds: rank-condition
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Linear(5, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = torch.randn(6, 8, 5)
labels = torch.randint(0, 2, (6, 8))
labels[2, 1::world_size] = -100
for x, y in zip(batches, labels):
    mine = y[rank::world_size]
    scores = model(x[rank::world_size])
    if (mine == -100).all():  # MISTAKE
        continue  # MISTAKE
    loss = nn.functional.cross_entropy(scores, mine)
    optimizer.zero_grad()
    loss.backward()  # MISTAKE
    optimizer.step()
dist.destroy_process_group()
