"""Give each rank different random numbers, and new ones in each epoch.

Dropout and augmentations draw from the generators of torch, NumPy and Python. Before
each epoch, each rank seeds all three from the training's seed, the epoch and its rank.
That way, no two ranks draw the same numbers, and a resumed training draws the same
numbers as one that was never interrupted.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import torch


def seed_of(*parts: object) -> int:
    """Hash `parts` to a number below 2**63, different for different parts."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_all(seed: int) -> None:
    """Seed the generators of torch (all devices), NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Restore the process's random generators at the end of the block."""
    theirs, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(theirs)
        np.random.set_state(arrays)
