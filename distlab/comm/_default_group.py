"""The end of torch's default process group, while something may still refer to it."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch.distributed as dist

_LEFT: deque[Any] = deque(maxlen=4)
"""A process that trains many times keeps the last few: the others have come to rest."""


def leave_default_group() -> None:
    """Destroy torch's default group, but keep the object behind it for a while.

    A moment after a collective is over, gloo's threads still drop its tensors, and for
    a tensor that Python knows they need the interpreter's lock. If a wrapper such as
    torch's DistributedDataParallel is then the last to hold the group, its end takes
    the group with it: it holds that lock and waits for those threads, forever. On busy
    cores that was one run in ten with torch 2.13.
    """
    _LEFT.append(dist.group.WORLD)
    dist.destroy_process_group()
