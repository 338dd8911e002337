"""A sharded optimizer whose state all ranks consolidate before rank 0 saves."""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 4)))
optimizer = ZeroRedundancyOptimizer(
    model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-3
)
for batch in torch.randn(3, 8, 4):
    x = batch[rank::world_size]
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()
optimizer.consolidate_state_dict(to=0)
if rank == 0:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, io.BytesIO())
dist.barrier()
dist.destroy_process_group()
