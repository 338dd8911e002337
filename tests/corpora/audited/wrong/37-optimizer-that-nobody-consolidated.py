"""The sharded optimizer's state is collected by rank 0 alone.

After https://github.com/pytorch/ignite/issues/2623
Finds: save-needs-all
"""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


def save_checkpoint(model, optimizer, file):
    optimizer.consolidate_state_dict(to=0)  # MISTAKE
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, file)


def main():
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
    if rank == 0:
        save_checkpoint(model, optimizer, io.BytesIO())  # MISTAKE
    dist.barrier()
    dist.destroy_process_group()


main()
