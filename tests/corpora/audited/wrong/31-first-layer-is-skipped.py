"""A module declares two networks and calls the second; one step is taken.

After https://github.com/pytorch/pytorch/issues/112152
Finds: unused-parameters
"""

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)  # MISTAKE
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(x)  # MISTAKE


def demo():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(42)
    ddp_model = DDP(ToyModel())  # MISTAKE
    torch.manual_seed(rank)
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.001)
    optimizer.zero_grad()
    outputs = ddp_model(torch.randn(20, 10))
    loss_fn(outputs, torch.randn(20, 5)).backward()
    optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    demo()
