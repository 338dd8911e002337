"""A sharded model generates text on rank 0 only; each forward gathers parameters.

Report: https://github.com/pytorch/pytorch/issues/100069
Ranks: 2
Kind: mismatch
Guilty: 0
Plain: hang
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
for layer in (model[0], model[2]):
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(2):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    with torch.no_grad():
        print("sample", model(torch.randn(1, 8)).argmax().item())  # HERE 0: all_gather
dist.barrier()  # HERE 1: barrier
dist.destroy_process_group()
