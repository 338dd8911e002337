"""Parameters that no rank used in a step, whose values and state torch doesn't change.

To the optimizer, a shard is one parameter. If only some of the model's parameters in it
were used, we split it into several, one for each of its ranges, in the same memory.
From then on, each of these has its own state, including its own count of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.given.sharded_optimizer.buckets import Bucket


def agree(comm: Comm, buckets: list[Bucket]) -> None:
    """Set each `was_used` to True if any rank used the parameter, by an all_reduce."""
    if comm.world_size == 1:
        return
    flags = [used for bucket in buckets for used in bucket.was_used]
    told = torch.tensor(flags, dtype=torch.int32, device=comm.device)
    comm.all_reduce(told)
    anywhere = iter(told.tolist())
    for bucket in buckets:
        bucket.was_used = [next(anywhere) > 0 for _ in bucket.names]


def leave_unused(optimizer: torch.optim.Optimizer, bucket: Bucket) -> None:
    """Remove the gradients of unused parameters, before the optimizer's step."""
    used = [bucket.was_used[number] for number, _, _ in bucket.shard_ranges]
    if not bucket.pieces and used and not any(used):
        bucket.shard.grad = None
    elif not bucket.pieces and not all(used):
        split(optimizer, bucket)
    gradient = bucket.shard.grad
    for piece, own, is_used in zip(bucket.pieces, bucket.slices(), used, strict=False):
        is_used &= gradient is not None
        piece.grad = gradient[own] if is_used else None  # type: ignore[index]


def split(optimizer: torch.optim.Optimizer, bucket: Bucket) -> None:
    """Turn each range of the shard into a parameter of its own, from now on."""
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            if parameter is bucket.shard:
                slices, shard = bucket.slices(), bucket.shard.detach()
                bucket.pieces = [nn.Parameter(shard[own]) for own in slices]
                group["params"][place : place + 1] = bucket.pieces
                kept = optimizer.state.pop(bucket.shard, {})
                for piece, own in zip(bucket.pieces, slices, strict=True):
                    optimizer.state[piece] = cut(kept, own)
                return


def cut(state: dict[str, Any], own: slice) -> dict[str, Any]:
    """Return the state of some elements of a shard."""
    return {
        key: value[own].clone() if is_per_element(value) else deepcopy(value)
        for key, value in state.items()
    }


def is_per_element(value: Any) -> bool:
    """Return True if an entry of the state has a number for each element."""
    return isinstance(value, Tensor) and value.dim() > 0


def parameters_of(buckets: list[Bucket]) -> Iterator[tuple[nn.Parameter, Bucket]]:
    """Yield the optimizer's parameters in each bucket."""
    for bucket in buckets:
        for parameter in bucket.pieces or [bucket.shard]:
            yield parameter, bucket
