"""A validation loss over padded shares, between epochs of training.

After https://github.com/Lightning-AI/pytorch-lightning/issues/4732
Finds: padded-evaluation
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Metric:
    def __init__(self):
        self.state = torch.zeros(2, dtype=torch.float64)

    def update(self, loss, count):
        self.state += torch.tensor([loss * count, count], dtype=torch.float64)

    def compute(self):
        dist.all_reduce(self.state)  # MISTAKE
        return (self.state[0] / self.state[1]).item()


def main():
    dist.init_process_group("gloo")
    n = dist.get_world_size()
    torch.manual_seed(0)
    train_set = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
    videos = TensorDataset(torch.randn(30, 4), torch.randn(30, 1))
    sampler = DistributedSampler(train_set)
    train = DataLoader(train_set, batch_size=16 // n, sampler=sampler)
    spread = DistributedSampler(videos, shuffle=False)  # MISTAKE
    valid = DataLoader(videos, batch_size=8, sampler=spread)
    model = DDP(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    criterion = nn.MSELoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        model.eval()
        metric = Metric()
        with torch.no_grad():
            for x, y in valid:
                metric.update(criterion(model(x), y).item(), len(x))
        value = metric.compute()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {value:.4f}")
    dist.destroy_process_group()


main()
