"""Random numbers: who seeded what, and where generators were made."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch

from distlab.audit.log import Memory, current
from distlab.audit.places import here
from distlab.audit.watching.patches import Patches


def watch(patches: Patches) -> None:
    """Install the hooks on the functions that seed."""
    import numpy as np

    patches.observe(torch, "manual_seed", before=_seeder("torch"))
    patches.observe(torch.random, "manual_seed", before=_seeder("torch"))
    patches.observe(random, "seed", before=_seeder("random"))
    patches.observe(np.random, "seed", before=_seeder("numpy"))
    for name in ("default_rng", "RandomState"):
        patches.replace(np.random, name, _noting_maker)
    patches.replace(random, "Random", _noting_maker)


def _seeder(which: str) -> Any:
    def seeded(memory: Memory, *args: Any, **kwargs: Any) -> None:
        place = here()
        if place is not None:
            memory.seeded[which] = place
        value = args[0] if args else kwargs.get("seed", kwargs.get("a"))
        memory.log.add("seed", which=which, value=repr(value))

    return seeded


def _noting_maker(original: Any) -> Any:
    if isinstance(original, type):
        return original  # a class has to stay one

    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        memory, place = current(), here()
        if memory is not None and place is not None:
            memory.seeded[f"generator {id(made)}"] = place
            memory.kept[id(made)] = made
        return made

    return make
