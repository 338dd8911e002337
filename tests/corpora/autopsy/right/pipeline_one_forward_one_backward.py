"""The 1F1B schedule on three stages whose sizes differ.

Ranks: 3
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
module = [nn.Linear(8, 32), nn.Linear(32, 4), nn.Linear(4, 8)][rank]
stage = PipelineStage(module, rank, size, torch.device("cpu"))
schedule = Schedule1F1B(stage, 6, loss_fn=nn.functional.mse_loss)
for _ in range(2):
    batch = torch.randn(12, 8)
    if rank == 0:
        schedule.step(batch)
    elif rank == size - 1:
        schedule.step(target=batch)
    else:
        schedule.step()
dist.destroy_process_group()
