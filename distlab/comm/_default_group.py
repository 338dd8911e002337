"""Open and close torch's default process group, for engines that need one."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

_LEFT: deque[Any] = deque(maxlen=4)
"""Keep this many old groups; by then, the threads of older ones are idle."""


def open_default_group(wire: str, device: torch.device, **place: Any) -> Any:
    """Create torch's default group unless it exists; return it only if we created it.

    `wire` is "gloo" or "nccl". If it is NCCL on a GPU, gloo carries the tensors that
    are on the CPU. `place` holds the arguments for torch's init_process_group: store,
    rank, world_size and timeout. Pass the return value to leave_default_group.
    """
    if dist.is_initialized():
        return None
    both = device.type == "cuda" and wire == "nccl"
    dist.init_process_group("cpu:gloo,cuda:nccl" if both else wire, **place)
    return dist.group.WORLD


def leave_default_group(opened: Any = None) -> None:
    """Destroy torch's default group, but keep the object behind it for a while.

    If you pass `opened`, we destroy it only if it is still the default group, because
    someone else may have destroyed it and created another one.

    For a moment after a collective, gloo's threads still drop its tensors. If Python
    knows such a tensor, they need the interpreter's lock to do so. Now suppose that a
    wrapper such as torch's DistributedDataParallel is the last to hold the group. When
    the wrapper is freed, it frees the group while holding that lock, and waits forever
    for those threads. With torch 2.13 on busy cores, that happened in one run out of
    ten.
    """
    if opened is None or (dist.is_initialized() and dist.group.WORLD is opened):
        _LEFT.append(dist.group.WORLD)
        dist.destroy_process_group()
