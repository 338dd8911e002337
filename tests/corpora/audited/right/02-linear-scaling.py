"""The batch size is per rank, and the learning rate grows with the global batch."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PER_RANK, BASE_RATE, BASE_BATCH = 4, 0.05, 4


def main():
    dist.init_process_group("gloo")
    world_size = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 5), torch.randn(64, 1))
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=PER_RANK, sampler=sampler)
    model = DDP(nn.Linear(5, 1))
    rate = BASE_RATE * PER_RANK * world_size / BASE_BATCH
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
