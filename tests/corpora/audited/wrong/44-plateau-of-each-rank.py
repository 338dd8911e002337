"""Each rank lowers its learning rate when its own loss stops falling.

After https://github.com/lucidrains/DALLE-pytorch/issues/268
Finds: replicas-differ
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # MISTAKE
scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)  # MISTAKE
for batch in torch.randn(12, 16, 4):
    x = batch[rank::world_size]
    loss = nn.functional.mse_loss(model(x), x.flip(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step(loss.item())  # MISTAKE
dist.destroy_process_group()
