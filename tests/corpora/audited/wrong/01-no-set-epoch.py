"""Two epochs in one order: nobody tells the sampler which epoch it is.

After https://github.com/pytorch/pytorch/issues/31771
Finds: set-epoch
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(1)
inputs, labels = torch.randn(64, 6), torch.randint(0, 3, (64,))
dataset = TensorDataset(inputs, labels)
sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=16 // dist.get_world_size(), sampler=sampler)
model = DistributedDataParallel(nn.Linear(6, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):  # MISTAKE
    for x, y in loader:  # MISTAKE
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
dist.destroy_process_group()
