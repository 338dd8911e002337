"""set_epoch is called, once, before the loop.

After https://github.com/yangkky/distributed_tutorial/issues/5
Finds: set-epoch
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
digits = TensorDataset(torch.randn(72, 8), torch.randint(0, 10, (72,)))
sampler = DistributedSampler(digits)
batches = BatchSampler(sampler, 12 // dist.get_world_size(), drop_last=False)
loader = DataLoader(digits, batch_sampler=batches)
network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))
network = nn.parallel.DistributedDataParallel(network)
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
sampler.set_epoch(0)  # MISTAKE
for epoch in range(2):  # MISTAKE
    for images, labels in loader:  # MISTAKE
        loss = F.cross_entropy(network(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
