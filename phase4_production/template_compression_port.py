"""Top-k as a communication hook of torch's DistributedDataParallel.

Guide: phase4_production/guide/compression_port.md.
Source: torch.nn.parallel of torch 2.13, DDP Communication Hooks.
Symbols: n = dist.get_world_size(); k = the elements of a bucket that a rank sends.
Cost: a rank sends (n-1)·k indices and values for a bucket, as in 4.10.

There is no comm in this file, because everything goes through torch's process group.

    here, with comm (4.10)             with torch
    hook(comm, bucket) -> Work         hook(state, bucket) -> Future[Tensor]
    bucket.flat, bucket.parameters     bucket.buffer(), bucket.parameters()
    comm.all_gather(…, async_op=True)  dist.all_gather(list, …, async_op=True)
    self.residuals                     the state, any object
    after wait(): bucket.flat, a sum   the future's value, and DDP divides nothing

torch reads the annotations of a hook. They must be classes and not strings, so this
file has no `from __future__ import annotations`.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class TopKState:
    """The state of one model's hook, which DDP passes to each call of the hook."""

    ratio: float
    residuals: dict[Any, Tensor] = field(default_factory=dict)  # its keys: you decide


def top_k_hook(
    state: TopKState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # mypy cannot see it
) -> torch.futures.Future[Tensor]:
    """Send only each rank's k largest gradients, with their indices; a hook for DDP.

    k = max(1, int(ratio · elements of the bucket)), by magnitude, as in 4.10. The
    future's value is a tensor like bucket.buffer(); DDP copies it into every .grad.
    Given: torch's default process group, gradients of one dtype. After the first step
    DDP rebuilds its buckets, so a parameter may move to a bucket of another index.

    C1 Every `.grad` is the sum of everything the ranks sent, divided by n. It is zero
       where no rank sent anything.
    C2 Whatever a rank didn't send is added to the same parameter's next gradient.
       Nothing is carried over for elements that it did send, or for elements that are
       inf or nan.
    C3 For each bucket, a rank sends k indices of 4 bytes each and k values, and nothing
       else.
    C4 No hook or callback waits for a message.
    In torch.distributed: GradBucket, Work.get_future, torch.futures.collect_all
    Example: n = 2; 5, 1 and 4, 2 with k = 1 → 4.5, 0 on both ranks
    Cost: (n-1)·k·(4 + bytes of a value). Check: distlab check 4.18
    """
    # TODO(compression_port.comm_hook)
    # residuals by what? what stays the same when the buckets are built anew?
    # work.get_future() is a future of one collective; collect_all of several ones
    # future.then(f) is a future of f(future)
    raise NotImplementedError("compression_port.comm_hook")


def compressed(module: nn.Module, ratio: float, bucket_mib: float) -> Any:
    """Return torch's DistributedDataParallel of `module`, with the hook registered.

    Given: torch's default process group. `bucket_mib` is the size of a bucket in MiB.

    The clauses are those of top_k_hook. Each call makes its own state.
    In torch.distributed: register_comm_hook(state, hook)
    Example: compressed(module, 0.01, 25)
    Cost: none. Check: distlab check 4.18
    """
    # TODO(compression_port.comm_hook)
    # one call registers the hook, and hands it its state
    raise NotImplementedError("compression_port.comm_hook")
