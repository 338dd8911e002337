"""Seeds as people have them, for generators that take 32 bits.

time.time_ns() and numpy's SeedSequence give 64 bits, -1 is a common default, and a
number from a numpy array is no int. torch's generators refuse some of these, and its
CPU generator uses only the lowest 32 bits of the others.
"""

from __future__ import annotations

import operator

import numpy as np


def any_seed(seed: int) -> int:
    """Return a seed of any size as Python's int.

    Raises:
        ValueError: it isn't an integer (numpy's are).
    """
    try:
        return operator.index(seed)
    except TypeError:
        raise ValueError(f"seed must be an integer, not {seed!r}") from None


def small_seed(seed: int) -> int:
    """Return a seed of 32 bits, which every generator takes.

    Seeds of 32 bits stay as they are. Of a larger or negative one, all bits count.

    Raises:
        ValueError: it isn't an integer (numpy's are).
    """
    number = any_seed(seed)
    if 0 <= number < 2**32:
        return number
    mixed = np.random.SeedSequence([abs(number), int(number < 0)])
    return int(mixed.generate_state(1)[0])
