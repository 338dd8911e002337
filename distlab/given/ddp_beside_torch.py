"""Compare torch's DDP with your class of unit distributed_data_parallel."""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from distlab.comm import TorchComm

NUM_RANKS, NUM_STEPS, WIDTH = 2, 8, 512
Wrap = Callable[..., nn.Module]


def compare_with_torch(yours: Wrap) -> None:
    """Print losses and times for the same steps with your class and with torch's."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    with tempfile.TemporaryDirectory() as folder:
        spawn: Any = mp.spawn  # type: ignore[attr-defined]
        spawn(_train, (yours, folder), NUM_RANKS)


def _train(rank: int, yours: Wrap, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_RANKS)
    torch.manual_seed(0)
    layers = [p for _ in range(6) for p in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1)).double()
    both = [
        yours(copy.deepcopy(model), TorchComm.from_default(), bucket_size_mib=4),
        nn.parallel.DistributedDataParallel(model, bucket_cap_mb=4),
    ]
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.1) for ddp in both]
    torch.manual_seed(rank)
    inputs = torch.randn(64, WIDTH, dtype=torch.float64)
    if rank == 0:
        print("step   yours: loss, ms              torch's: loss, ms")
    for step in range(NUM_STEPS):
        row = []
        for ddp, optimizer in zip(both, optimizers, strict=True):
            started = time.perf_counter()
            optimizer.zero_grad()
            loss = (ddp(inputs) - inputs[:, :1]).square().mean()
            loss.backward()
            optimizer.step()
            took_ms = 1000 * (time.perf_counter() - started)
            row.append(f"{float(loss.detach()):.12f}  {took_ms:6.1f}")
        if rank == 0:
            print(f"{step:4}   {row[0]:26}    {row[1]}")
    dist.destroy_process_group()
