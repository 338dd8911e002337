"""Open and close torch's default process group, for engines that need one."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

_LEFT: deque[Any] = deque(maxlen=4)
"""Keep this many old groups; by then, all older ones have come to rest."""


def open_default_group(wire: str, device: torch.device, **place: Any) -> Any:
    """Make torch's default group unless there is one; return it only if we made it.

    `wire` is "gloo" or "nccl". With NCCL on a GPU, gloo carries the tensors on the CPU.
    `place` goes to torch's init_process_group: store, rank, world_size, timeout. Pass
    what this returns to leave_default_group.
    """
    if dist.is_initialized():
        return None
    both = device.type == "cuda" and wire == "nccl"
    dist.init_process_group("cpu:gloo,cuda:nccl" if both else wire, **place)
    return dist.group.WORLD


def leave_default_group(opened: Any = None) -> None:
    """Destroy torch's default group, but keep the object behind it for a while.

    With `opened`, only if that is still the default group: somebody else may have
    destroyed it and made another.

    A moment after a collective is over, gloo's threads still drop its tensors, and for
    a tensor that Python knows they need the interpreter's lock. If a wrapper such as
    torch's DistributedDataParallel is then the last to hold the group, its end takes
    the group with it: it holds that lock and waits for those threads, forever. On busy
    cores that was one run in ten with torch 2.13.
    """
    if opened is None or (dist.is_initialized() and dist.group.WORLD is opened):
        _LEFT.append(dist.group.WORLD)
        dist.destroy_process_group()
