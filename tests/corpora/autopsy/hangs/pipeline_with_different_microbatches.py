"""The stages disagree about the number of micro-batches.

Report: https://github.com/pytorch/torchtitan/issues/775
Ranks: 2
Kind: deadlock
Guilty: 0,1
Plain: hang
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
stage = PipelineStage(nn.Linear(16, 16), rank, 2, torch.device("cpu"))
n_microbatches = 4 if rank == 0 else 2
schedule = ScheduleGPipe(stage, n_microbatches, loss_fn=nn.functional.mse_loss)
inputs, target = torch.randn(8, 16), torch.randn(8, 16)
if rank == 0:
    schedule.step(inputs)  # HERE 0: send
else:
    schedule.step(target=target[:4])  # HERE 1: send
dist.barrier()
dist.destroy_process_group()
