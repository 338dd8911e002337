"""Every rank has to call the distributed checkpoint's save; only rank 0 does.

Report: https://github.com/deepspeedai/DeepSpeed/pull/801
Ranks: 3
Kind: mismatch
Guilty: 0
Plain: hang
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Linear(4, 4)
for step in range(6):
    grad = torch.ones(4)
    dist.all_reduce(grad)  # HERE 1,2: all_reduce
    if step == 3 and rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            dcp.save(model.state_dict(), checkpoint_id=folder)  # HERE 0: gather
dist.destroy_process_group()
