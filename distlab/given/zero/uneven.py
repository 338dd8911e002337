"""Parameters that no rank used in a step: torch leaves them and their state alone.

A shard is one parameter to the optimizer. Where only some of a shard's parameters were
used, it becomes several: one for each of its ranges, in the same memory. From then on
each has a state of its own, its count of steps too.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.given.zero.buckets import Bucket


def agree(comm: Comm, buckets: list[Bucket]) -> None:
    """Each bucket's `was_used` becomes that of any rank. One small all_reduce."""
    if comm.world_size == 1:
        return
    flags = [used for bucket in buckets for used in bucket.was_used]
    told = torch.tensor(flags, dtype=torch.int32, device=comm.device)
    comm.all_reduce(told)
    anywhere = iter(told.tolist())
    for bucket in buckets:
        bucket.was_used = [next(anywhere) > 0 for _ in bucket.names]


def leave_unused(optimizer: torch.optim.Optimizer, bucket: Bucket) -> None:
    """Take the gradients from what was not used, before the optimizer's step."""
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
    """From now on each range of the shard is a parameter of its own."""
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
    """The state of some elements of a shard."""
    return {
        key: value[own].clone() if is_per_element(value) else deepcopy(value)
        for key, value in state.items()
    }


def is_per_element(value: Any) -> bool:
    """Whether an entry of the state has a number for each element."""
    return isinstance(value, Tensor) and value.dim() > 0


def parameters_of(buckets: list[Bucket]) -> Iterator[tuple[nn.Parameter, Bucket]]:
    """What the optimizer has of each bucket."""
    for bucket in buckets:
        for parameter in bucket.pieces or [bucket.shard]:
            yield parameter, bucket
