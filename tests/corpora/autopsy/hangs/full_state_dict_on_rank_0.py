"""Only rank 0 asks for the full state dict of a sharded model, which gathers it.

Report: https://github.com/EleutherAI/bergson/pull/380
Ranks: 2
Kind: mismatch
Guilty: 0
Plain: hang
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
fully_shard(model)
for _ in range(2):
    model(torch.randn(4, 8)).sum().backward()
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
if dist.get_rank() == 0:
    state = get_model_state_dict(model, options=options)  # HERE 0: all_gather
    print(sum(value.numel() for value in state.values()))
dist.barrier()  # HERE 1: barrier
dist.destroy_process_group()
