"""One seed for everything: the ranks drop the same elements.

After https://github.com/huggingface/transformers/issues/31412
Finds: same-random-numbers
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(40)  # MISTAKE
dataset = TensorDataset(torch.randn(32, 6), torch.randint(0, 2, (32,)))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8 // dist.get_world_size(), sampler=sampler)
layers = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 2))
model = DDP(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.destroy_process_group()
