"""An exponential average is kept on every rank, and evaluated in shares.

Ranks: 2
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
average = AveragedModel(model.module)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    average.update_parameters(model.module)
counts = torch.zeros(2)
for index in range(rank, 11, size):
    predicted = average(torch.randn(1, 4)).argmax()
    counts += torch.tensor([float(predicted == index % 2), 1.0])
dist.reduce(counts, dst=0)
if rank == 0:
    print("accuracy", (counts[0] / counts[1]).item(), "of", int(counts[1]))
dist.destroy_process_group()
