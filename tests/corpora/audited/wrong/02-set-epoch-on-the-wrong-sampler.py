"""The evaluation's sampler hears of the epoch, the training's does not.

After https://github.com/lucidrains/DALLE-pytorch/pull/230
Finds: set-epoch
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_loader(count, batch_size):
    generator = torch.Generator().manual_seed(count)
    data = TensorDataset(torch.randn(count, 5, generator=generator))
    sampler = DistributedSampler(data)
    return sampler, DataLoader(data, batch_size=batch_size, sampler=sampler)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    n = dist.get_world_size()
    _, train = make_loader(48, 12 // n)
    valid_sampler, valid = make_loader(24, 12 // n)
    model = DDP(nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 5)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        valid_sampler.set_epoch(epoch)  # MISTAKE
        for (x,) in train:  # MISTAKE
            loss = nn.functional.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        total = torch.zeros(2)
        with torch.no_grad():
            for (x,) in valid:
                total += torch.tensor([((model(x) - x) ** 2).sum(), x.numel()])
        dist.all_reduce(total)
    dist.destroy_process_group()


main()
