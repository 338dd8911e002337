"""A training loop of the kind you find online, with five bugs to hunt.

Don't copy anything from here. The walkthrough asks the reader to find the bugs, runs
the loop, shows how it ends, and names them.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from distlab.runner import RankContext


def tutorial_loop(context: RankContext, unit: ModuleType, *, seed: int = 0) -> None:
    """Train on made-up samples, on every rank."""
    comm = context.comm
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(64, 8, generator=generator)
    data: Any = TensorDataset(inputs, inputs.argmax(dim=1))
    sampler = unit.DistributedSampler(64, comm.rank, comm.world_size)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _epoch in range(2):
        for batch, targets in loader:
            cross_entropy(model(batch), targets).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    comm.all_reduce(parameter.grad)
            optimizer.step()
        if comm.rank == 0:
            right = (model(inputs).argmax(dim=1) == inputs.argmax(dim=1)).sum()
            comm.all_reduce(right)
            print(f"accuracy {right / 64:.2f}")
