"""Four micro-batches through a pipeline of two stages, forward and backward.

Ranks: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
stage = PipelineStage(nn.Linear(16, 16), rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
for _ in range(3):
    inputs, target = torch.randn(8, 16), torch.randn(8, 16)
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=target, losses=losses)
        print(torch.stack(losses).mean().item())
dist.destroy_process_group()
