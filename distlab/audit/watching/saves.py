"""torch.save: by whom, and whether what it writes is one rank's part."""

from __future__ import annotations

from typing import Any

import torch

from distlab.audit.log import Memory
from distlab.audit.watching.patches import Patches

_DEEP = 4


def watch(patches: Patches) -> None:
    """Install the hook."""
    patches.observe(torch, "save", before=_saved)


def _saved(memory: Memory, thing: Any, *args: Any, **kwargs: Any) -> None:
    memory.log.add("save", sharded=_sharded(thing, _DEEP))


def _sharded(thing: Any, depth: int) -> str:
    """Return the key of a tensor of which this rank has a part only, or ""."""
    if depth < 0 or not isinstance(thing, (dict, list, tuple)):
        return ""
    pairs = thing.items() if isinstance(thing, dict) else enumerate(thing)
    for key, value in pairs:
        placements = getattr(value, "placements", ())
        if any(placement.is_shard() for placement in placements):
            return str(key)
        if type(value).__name__ == "ShardedTensor":
            return str(key)
        inside = _sharded(value, depth - 1)
        if inside:
            return f"{key}.{inside}"
    return ""
