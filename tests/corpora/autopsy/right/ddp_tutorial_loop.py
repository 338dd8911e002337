"""A trainer class with a distributed sampler and snapshots, as in the DDP tutorial.

Ranks: 2
"""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model: nn.Module, data: DataLoader, save_every: int) -> None:
        self.rank = dist.get_rank()
        self.data, self.save_every = data, save_every
        self.model = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train(self, epochs: int) -> None:
        for epoch in range(epochs):
            self.data.sampler.set_epoch(epoch)
            for source, target in self.data:
                self.optimizer.zero_grad()
                loss = nn.functional.mse_loss(self.model(source), target)
                loss.backward()
                self.optimizer.step()
            if self.rank == 0 and epoch % self.save_every == 0:
                torch.save(self.model.module.state_dict(), io.BytesIO())


dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.rand(128, 20), torch.rand(128, 1))
loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
Trainer(nn.Linear(20, 1), loader, save_every=2).train(4)
dist.destroy_process_group()
