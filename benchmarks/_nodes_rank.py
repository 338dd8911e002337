"""A rank of benchmarks/nodes.py: step times and bytes of one training, sent six ways.

The same model and batches for all; only how gradients travel differs. Rank 0 writes
what it measured, JSON, to the path that it is given. Units are the reference's.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks._ratios import in_turn
from distlab.comm import TorchComm, leave_default_group
from distlab.curriculum import load
from distlab.given.gradient_compression import fp16

NUM_LAYERS, WIDTH, BATCH = 10, 316, 1024
TWO_LAYERS_MIB = 2 * (WIDTH + 1) * WIDTH * 4 / 2**20
NUM_STEPS, NUM_WARMUP = 12, 2
RATIO = 0.01  # of top-k

Step = Callable[[], None]


def make_model() -> nn.Module:
    """Ten layers of one size: about a million parameters, 4 MB of gradients."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers)


def ways(comm: TorchComm) -> dict[str, tuple[nn.Module, Step]]:
    """By name: what is trained, and what follows backward()."""
    wrap = load("distributed_data_parallel").DistributedDataParallel
    average = load("trainer").average_gradients
    top_k = load("gradient_compression").TopK
    single = make_model()

    def ddp(bucket_mib: float, hook: Any = None) -> tuple[nn.Module, Step]:
        model = wrap(make_model(), comm, bucket_size_mib=bucket_mib, comm_hook=hook)
        return model, lambda: None

    five = TWO_LAYERS_MIB * 1.01
    alone = make_model()
    return {
        "nothing is sent": (alone, lambda: None),
        "no buckets": (single, lambda: average(comm, single)),
        "one bucket": ddp(1000.0),
        "five buckets": ddp(five),
        "five, fp16": ddp(five, fp16),
        "five, top-k 1 %": ddp(five, top_k(RATIO)),
    }


def measure(comm: TorchComm) -> dict[str, dict[str, float]]:
    """By name: seconds of a step, and bytes that left this node in it.

    The ways take turns, so that what else the machine does slows all of them alike.
    """
    torch.manual_seed(comm.rank)
    inputs, targets = torch.randn(2, BATCH, WIDTH).unbind()
    trained = ways(comm)
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=0.01)
        for name, (model, _) in trained.items()
    }
    sent: dict[str, list[int]] = {name: [] for name in trained}

    def step(name: str) -> None:
        model, after = trained[name]
        before = bytes_sent()
        optimizers[name].zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        after()
        optimizers[name].step()
        sent[name].append(bytes_sent() - before)

    turns = [partial(step, name) for name in trained]
    took = in_turn(turns, NUM_STEPS, warm_up=NUM_WARMUP, before=comm.barrier)
    return {
        name: {
            "step_s": statistics.median(times_s),
            "least_s": min(times_s),
            "most_s": max(times_s),
            "sent_bytes": statistics.median(sent[name][NUM_WARMUP:]),
        }
        for name, times_s in zip(trained, zip(*took, strict=True), strict=True)
    }


def bytes_sent() -> int:
    """What has left this node, by the counter of its interface."""
    name = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        if line.strip().startswith(f"{name}:"):
            return int(line.partition(":")[2].split()[8])
    raise SystemExit(f"no interface {name}")


def main(path: str) -> None:
    """Join the job, measure all ways, and let rank 0 write it down."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    comm = TorchComm.from_default()
    found = measure(comm)
    comm.barrier()
    if comm.rank == 0:
        Path(path).write_text(json.dumps(found))
    leave_default_group()


if __name__ == "__main__":
    main(sys.argv[1])
