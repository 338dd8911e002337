"""Random numbers: who seeded which of the global generators, and where."""

from __future__ import annotations

import random
from typing import Any

import torch

from distlab.audit.log import Memory
from distlab.audit.places import here
from distlab.audit.watching.patches import Patches


def watch(patches: Patches) -> None:
    """Install the hooks on the functions that seed."""
    import numpy as np

    patches.observe(torch, "manual_seed", before=_seeder("torch"))
    patches.observe(torch.random, "manual_seed", before=_seeder("torch"))
    patches.observe(random, "seed", before=_seeder("random"))
    patches.observe(np.random, "seed", before=_seeder("numpy"))


def _seeder(which: str) -> Any:
    def seeded(memory: Memory, *args: Any, **kwargs: Any) -> None:
        place = here()
        if place is not None:
            memory.seeded[which] = place
        value = args[0] if args else kwargs.get("seed", kwargs.get("a"))
        memory.log.add("seed", which=which, value=repr(value))

    return seeded
