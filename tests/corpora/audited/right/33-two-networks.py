"""A generator and a discriminator, each with its own DDP and optimizer."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
generator = DDP(nn.Linear(2, 4))
critic = DDP(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)))
make = torch.optim.Adam(generator.parameters(), lr=1e-3)
judge = torch.optim.Adam(critic.parameters(), lr=1e-3)
real = torch.randn(4, 16, 4)
torch.manual_seed(10 + rank)
entropy = nn.functional.binary_cross_entropy_with_logits
for batch in real:
    x = batch[rank::world_size]
    fake = generator(torch.randn(len(x), 2))
    both = critic(torch.cat([x, fake.detach()]))
    truth = torch.cat([torch.ones(len(x), 1), torch.zeros(len(x), 1)])
    judge.zero_grad()
    entropy(both, truth).backward()
    judge.step()
    for parameter in critic.parameters():
        parameter.requires_grad_(False)
    make.zero_grad()
    entropy(critic.module(fake), torch.ones(len(x), 1)).backward()
    make.step()
    for parameter in critic.parameters():
        parameter.requires_grad_(True)
dist.destroy_process_group()
