"""The last stage of a pipeline runs one step fewer than the stages before it.

Report: https://github.com/hpcaitech/ColossalAI/pull/2156
Ranks: 3
Kind: deadlock
Guilty: 2
Plain: hang
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
stage = PipelineStage(nn.Linear(8, 8), rank, size, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
inputs, target = torch.randn(8, 8), torch.randn(8, 8)
steps = 3 if rank < size - 1 else 2
for _ in range(steps):
    if rank == 0:
        schedule.step(inputs)  # HERE 0: recv
    elif rank == size - 1:
        schedule.step(target=target)
    else:
        schedule.step()  # HERE 1: send
dist.barrier()  # HERE 2: barrier
dist.destroy_process_group()
