"""What the process that forks the ranks does once, so that no rank has to do it first.

torch looks much up at its first use: generators, kernels, an optimiser's machinery. In
a forked rank that costs a thousand page faults, and again in each. These few steps
start no thread, which forking would not survive.
"""

from __future__ import annotations

import torch
from torch import nn

from distlab.install import has_nvidia_gpu


def one_step() -> None:
    """Seed, predict, go backward, and step an optimiser with momentum.

    Not where torch could use a GPU: backward() asks CUDA how many there are, and what
    is forked from a process that has asked cannot use them.
    """
    if torch.backends.cuda.is_built() and (torch.version.hip or has_nvidia_gpu()):
        return
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        scores = model(torch.randn(4, 3, dtype=torch.float64))
        nn.functional.cross_entropy(scores, torch.randint(0, 2, (4,))).backward()
        optimizer.step()
    torch.cat([p.detach().flatten() for p in model.parameters()]).square().mean()
