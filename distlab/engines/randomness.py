"""The random numbers of a rank: others on every rank and in every epoch.

Dropout and augmentations draw from the generators of torch, NumPy and Python. Each rank
seeds all three before an epoch, from the training's seed, the epoch and its rank. So no
two ranks draw the same numbers, and a resumed training draws those of one that ran
through.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import torch


def seed_of(*parts: object) -> int:
    """A number below 2**63 that differs for different parts."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_all(seed: int) -> None:
    """Seed the generators of torch (all devices), NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """A block after which the process's generators are as they were before it."""
    theirs, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(theirs)
        np.random.set_state(arrays)
