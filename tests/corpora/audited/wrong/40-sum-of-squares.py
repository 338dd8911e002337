"""The loss is a sum over the rank's samples, but DDP takes the mean over ranks.

After https://github.com/pytorch/pytorch/issues/37359
Finds: not-the-same-training
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 5), torch.randn(64, 2))
    sampler = DistributedSampler(dataset)
    size = 16 // dist.get_world_size()
    loader = DataLoader(dataset, batch_size=size, sampler=sampler)
    model = DDP(nn.Linear(5, 2))
    criterion = nn.MSELoss(reduction="sum")  # MISTAKE
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = criterion(model(x), y)  # MISTAKE
            optimizer.zero_grad()
            loss.backward()  # MISTAKE
            optimizer.step()
    dist.destroy_process_group()


main()
