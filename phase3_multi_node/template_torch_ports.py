"""Phase 3 with torch's own functions: DDP with a hook, hybrid sharding, a rendezvous.

Guide: phase3_multi_node/guide/torch_ports.md.
Source: torch.distributed of torch 2.13.
Symbols: n = dist.get_world_size(); K = the microbatches of a rank in one step.
Cost: a step sends each gradient once, as in 3.11 and 3.16.

There is no comm in this file: everything goes through torch's process groups.

    3.9 to 3.11   buckets, hooks, no_sync   DistributedDataParallel, a hook, no_sync
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LossFn = Callable[[Tensor, Tensor], Tensor]
Microbatches = Sequence[tuple[Tensor, Tensor]]

# ── 3.26 DistributedDataParallel with a communication hook ──────────────────────────


def data_parallel(module: nn.Module, bucket_mib: float, wire: torch.dtype) -> Any:
    """Return torch's DistributedDataParallel of `module`; gradients travel as `wire`.

    Given: torch's default process group. `bucket_mib` is the size of a bucket in MiB,
    `wire` a floating dtype, perhaps narrower than that of the gradients. A hook
    replaces all that DDP does with a bucket, the division too.

    C1 after accumulate(), every .grad is the mean over the ranks of their sums over
    the microbatches
    C2 each gradient is sent once per accumulate(), as `wire`
    C3 the gradients leave in buckets, and no hook waits for a message
    In torch.distributed: register_comm_hook(state, hook)
    Example: n = 2, gradients 2 and 4 → 3 on both ranks; two bytes each with bfloat16
    Cost: one all_reduce of the gradients, as `wire`. Check: distlab check 3.26
    """

    # TODO(torch_ports.data_parallel)
    # nn.parallel.DistributedDataParallel(module, bucket_cap_mb=…)
    # the hook: def hook(state, bucket) with these two names, and without annotations.
    # bucket.buffer() is a flat tensor. A hook returns a future of what replaces it.
    raise NotImplementedError("torch_ports.data_parallel")


def accumulate(model: Any, loss_fn: LossFn, microbatches: Microbatches) -> None:
    """Backward for each microbatch; only the last one sends.

    Given: `model` of data_parallel(). loss_fn(outputs, targets) is one microbatch's
    contribution: do not divide it. There is at least one microbatch, and every .grad
    is None.

    C1 to C3 as above
    In torch.distributed: with model.no_sync():
    Example: microbatches with gradients 1 and 2 on rank 0, 4 and 5 on rank 1 → 6
    Cost: one all_reduce of the gradients. Check: distlab check 3.26
    """
    # TODO(torch_ports.data_parallel)
    # what is under no_sync(): forward, backward, or both?
    raise NotImplementedError("torch_ports.data_parallel")
