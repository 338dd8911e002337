"""Phase 3 with torch's own functions: DDP with a hook, hybrid sharding, a rendezvous.

Guide: phase3_multi_node/guide/torch_ports.md.
Source: torch.distributed of torch 2.13.
Symbols: n = dist.get_world_size(); K = the microbatches of a rank in one step.
Cost: a step sends each gradient once, as in 3.11 and 3.16.

There is no comm in this file, because everything goes through torch's process groups.

    3.9 to 3.11   buckets, hooks, no_sync   DistributedDataParallel, a hook, no_sync
    3.12 to 3.22  ZeRO, state by name       fully_shard, torch.distributed.checkpoint
    3.7, 3.17     a rendezvous, levels      TCPStore, PrefixStore, new_group
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore, checkpoint  # type: ignore[attr-defined]
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dcp: Any = checkpoint
LossFn = Callable[[Tensor, Tensor], Tensor]
Microbatches = Sequence[tuple[Tensor, Tensor]]

# ── 3.26 DistributedDataParallel with a communication hook ──────────────────────────


def data_parallel(module: nn.Module, bucket_mib: float, wire: torch.dtype) -> Any:
    """Return torch's DistributedDataParallel of `module`; gradients travel as `wire`.

    Given: torch's default process group. `bucket_mib` is the size of a bucket in MiB,
    `wire` a floating dtype, perhaps narrower than the gradients', where values that are
    too large become inf. A hook replaces everything DDP does with a bucket, including
    the division, which may come before the sum or after it.

    C1 Each rank sums its gradients over its microbatches. After accumulate(), every
       `.grad` is the mean of these sums over all ranks.
    C2 Each call of accumulate() sends every gradient only once, converted to the dtype
       `wire`.
    C3 Gradients are sent in buckets, and no hook or callback waits for a message.
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
    """Run backward for each microbatch, but send only with the last one.

    Given: `model` of data_parallel(). loss_fn(outputs, targets) is one microbatch's
    contribution, so don't divide it. There is at least one microbatch, and every .grad
    is None.

    The clauses are those of data_parallel.
    In torch.distributed: with model.no_sync():
    Example: microbatches with gradients 1 and 2 on rank 0, 4 and 5 on rank 1 → 6
    Cost: one all_reduce of the gradients. Check: distlab check 3.26
    """
    # TODO(torch_ports.data_parallel)
    # what is under no_sync(): forward, backward, or both?
    raise NotImplementedError("torch_ports.data_parallel")


# ── 3.27 fully_shard on a mesh of replicas and shards, and its checkpoint ───────────


def hybrid_shard(
    model: nn.Sequential, replicas: int, compute: torch.dtype, reduce: torch.dtype
) -> None:
    """Shard the weights of `model` in place, `replicas` times, with fully_shard.

    Given: torch's default process group on CPU; `replicas` divides n. Each child of
    `model` is a layer, with any number of rows. The first n / replicas ranks store one
    replica, the next ranks the next one. `compute` is the dtype of forward and
    backward, `reduce` that of the sums over the ranks; the stored weights keep theirs.

    C1 After several training steps, the weights match the single-process baseline.
    C2 With s = n / replicas, each rank stores 1/s of the weights, and the ranks of a
       replica together store all of them.
    C3 Each layer needs an all_gather and a reduce_scatter within a replica, and an
       all_reduce between replicas.
    In torch.distributed: init_device_mesh, fully_shard, MixedPrecisionPolicy
    Example: n = 4, replicas = 2: ranks 0 and 1 store one replica, 2 and 3 the other
    Cost: between replicas, 1/s of the gradients. Check: distlab check 3.27
    """
    # TODO(torch_ports.hybrid_shard)
    # a mesh of two dimensions: fully_shard replicates along the first one.
    # what does fully_shard gather at once if you call it for the model only?
    raise NotImplementedError("torch_ports.hybrid_shard")


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Write weights and optimizer state to `folder`, which all ranks share.

    C4 A model on a different number of ranks can load the saved weights and continue.
    In torch.distributed: get_state_dict, torch.distributed.checkpoint.save
    Example: 4 ranks call save, 2 ranks call load with another model and optimizer
    Cost: each element is written once. Check: distlab check 3.27
    """
    # TODO(torch_ports.hybrid_shard)
    # one dict with both, and checkpoint_id is the folder
    raise NotImplementedError("torch_ports.hybrid_shard")


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Load the weights and optimizer state that save() wrote.

    C4 A model on a different number of ranks can load the saved weights and continue.
    In torch.distributed: torch.distributed.checkpoint.load, set_state_dict
    Example: the optimizer is new, and has its momentum afterwards
    Cost: each rank reads its own shards. Check: distlab check 3.27
    """
    # TODO(torch_ports.hybrid_shard)
    # dcp.load fills tensors that are there: which ones do you give it?
    raise NotImplementedError("torch_ports.hybrid_shard")


# ── 3.28 a rendezvous on torch's TCPStore, and subgroups ────────────────────────────


def meet(
    host: str, port: int, world_size: int, generation: int, timeout_s: float
) -> None:
    """Join torch's default process group (gloo) with a rank from the store.

    Given: a TCPStore listens at `host` and `port`. No rank hosts it, so it outlives
    all generations. `world_size` processes or more call meet(); none knows its rank.
    The next `generation` begins after the process group of the last one has gone.

    C1 The world_size processes get the ranks 0 to n - 1, and each rank is given out
       once.
    C2 Each generation begins at rank 0 again. If more than world_size processes call
       `meet`, it raises ValueError in each extra process.
    C3 Neither the store nor the process group waits longer than timeout_s.
    In torch.distributed: TCPStore, PrefixStore, init_process_group(store=…)
    Example: two processes call meet(…, 2, 1, 60): one becomes rank 0, one rank 1
    Cost: one message, and what gloo needs to connect. Check: distlab check 3.28
    """
    # TODO(torch_ports.groups)
    # store.add(key, 1) returns the sum: what does the first caller get?
    # the store keeps all keys of older generations: whose addresses are in them?
    raise NotImplementedError("torch_ports.groups")


def node_and_rail(ranks_per_node: int) -> tuple[Any, Any]:
    """Return two process groups: the ranks of my node, and those like me elsewhere.

    Given: the default process group; `ranks_per_node` divides n. Node i has the ranks
    i · ranks_per_node and those after it. A rail has one rank of each node, those with
    the same local rank.

    C4 Both groups contain the right ranks in ascending order, and the call returns on
       every rank.
    In torch.distributed: new_group(ranks)
    Example: 4 ranks, 2 per node: rank 2 gets the groups of ranks 2, 3 and of 0, 2
    Cost: no tensor is sent. Check: distlab check 3.28
    """
    # TODO(torch_ports.groups)
    # which ranks call new_group for the group of ranks 2 and 3?
    raise NotImplementedError("torch_ports.groups")
