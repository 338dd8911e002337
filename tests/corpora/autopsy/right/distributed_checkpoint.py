"""All ranks save a sharded model and load it again.

Ranks: 2
"""

import tempfile

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
folder: list = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder, src=0)
model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
fully_shard(model)
dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
for parameter in model.parameters():
    nn.init.zeros_(parameter)
state = {"model": model.state_dict()}
dcp.load(state, checkpoint_id=folder[0])
model.load_state_dict(state["model"])
print(dist.get_rank(), model[0].weight.full_tensor().abs().sum().item() > 0)
dist.destroy_process_group()
