"""backward() is left out where the loss is zero, and that differs by rank.

After https://github.com/facebookresearch/maskrcnn-benchmark/issues/619
Finds: rank-condition
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def triplet(anchor, positive, negative, margin=0.2):
    near = (anchor - positive).norm(dim=1)
    far = (anchor - negative).norm(dim=1)
    return torch.relu(near + margin - far).mean()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = DDP(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(4):
        torch.manual_seed(step * 10 + rank)
        anchor = torch.randn(4, 3)
        easy = 100.0 if step == 2 and rank == 3 else 0.1
        rows = torch.cat([anchor, anchor + 0.01, anchor + easy])
        loss = triplet(*net(rows).chunk(3))
        if loss != 0:  # MISTAKE
            optimizer.zero_grad()
            loss.backward()  # MISTAKE
            optimizer.step()
    dist.destroy_process_group()


main()
