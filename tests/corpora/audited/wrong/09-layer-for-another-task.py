"""A layer is made for inputs that this run doesn't have.

After https://github.com/chemprop/chemprop/pull/883
Finds: unused-parameters
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class MessagePassing(nn.Module):
    def __init__(self, width, extra=0):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)
        self.descriptors = nn.Linear(width + extra, width)  # MISTAKE
        self.extra = extra

    def forward(self, x):
        x = torch.relu(self.outer(torch.relu(self.inner(x))))
        return self.descriptors(x) if self.extra else x


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DDP(MessagePassing(5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.randn(4, 8, 5)
    for batch in data:
        x = batch[dist.get_rank() :: dist.get_world_size()]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), x).backward()
        optimizer.step()
    dist.destroy_process_group()


main()
