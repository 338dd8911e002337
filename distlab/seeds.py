"""Turn any integer into a seed for generators that take 32 bits.

People use time.time_ns() or numpy's SeedSequence, which give 64 bits. Others use -1 as
a default, or a number from a numpy array, which isn't an int. torch's generators refuse
some of these, and its CPU generator uses only the lowest 32 bits of the rest.
"""

from __future__ import annotations

import operator

import numpy as np


def any_seed(seed: int) -> int:
    """Return a seed of any size as a Python int.

    Raises:
        ValueError: it isn't an integer (numpy's are).
    """
    try:
        return operator.index(seed)
    except TypeError:
        raise ValueError(f"seed must be an integer, not {seed!r}") from None


def small_seed(seed: int) -> int:
    """Return a 32-bit seed, which every generator accepts.

    A seed that fits into 32 bits is unchanged. All bits of a larger or negative seed
    affect the result.

    Raises:
        ValueError: it isn't an integer (numpy's are).
    """
    number = any_seed(seed)
    if 0 <= number < 2**32:
        return number
    mixed = np.random.SeedSequence([abs(number), int(number < 0)])
    return int(mixed.generate_state(1)[0])
