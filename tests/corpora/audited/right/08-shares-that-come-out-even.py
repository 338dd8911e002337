"""A distributed evaluation of a set that the ranks can share equally."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
n = dist.get_world_size()
train_set = TensorDataset(torch.randn(48, 4), torch.randint(0, 2, (48,)))
valid_set = TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))
sampler = DistributedSampler(train_set)
train = DataLoader(train_set, batch_size=12 // n, sampler=sampler)
spread = DistributedSampler(valid_set, shuffle=False)
valid = DataLoader(valid_set, batch_size=20 // n, sampler=spread)
model = DDP(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for x, y in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    right = torch.zeros(())
    with torch.no_grad():
        for x, y in valid:
            right += (model(x).argmax(1) == y).sum()
    dist.all_reduce(right)
    if dist.get_rank() == 0:
        print(f"epoch {epoch} accuracy {right / len(valid_set):.3f}")
dist.destroy_process_group()
