"""All ranks gather the full state dict, and only rank 0 writes it.

Ranks: 3
"""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(9, 12), nn.Linear(12, 6))
fully_shard(model[0])
fully_shard(model)
model(torch.randn(4, 9)).sum().backward()
options = StateDictOptions(full_state_dict=True, cpu_offload=True)
state = get_model_state_dict(model, options=options)
if dist.get_rank() == 0:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    print(len(buffer.getvalue()), "bytes")
dist.barrier()
dist.destroy_process_group()
