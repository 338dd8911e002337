"""All ranks load the same checkpoint before the model is wrapped."""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def saved():
    torch.manual_seed(3)
    file = io.BytesIO()
    torch.save({"model": nn.Linear(4, 4).state_dict(), "epoch": 2}, file)
    file.seek(0)
    return file


dist.init_process_group("gloo")
checkpoint = torch.load(saved(), weights_only=True)
torch.manual_seed(0)
model = nn.Linear(4, 4)
model.load_state_dict(checkpoint["model"])
model = DDP(model)
dataset = TensorDataset(torch.randn(40, 4))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8 // dist.get_world_size(), sampler=sampler)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(checkpoint["epoch"], checkpoint["epoch"] + 2):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
dist.destroy_process_group()
