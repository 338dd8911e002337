"""Scenarios that are played twice in one process, with other sizes the first time.

That is for S3: what a call remembers of the first time is wrong the second time. The
first has the seed of the second plus OTHER_SEED, see differential/observe.py. Where a
contract leaves sizes open, they differ between the two, as the values do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
OTHER_SEED = 1_000_003  # added to the seed the first time


def turned(sizes: Sequence[T], seed: int) -> tuple[T, ...]:
    """`sizes` by rank; the first time each rank has the size of another one.

    The seed tells which time it is: it is below a million the second time, unless
    somebody asks for another one.
    """
    first = seed // 1_000_000 % len(sizes)
    return (*sizes[first:], *sizes[:first])


def played_once(scenario: F) -> F:
    """Mark a scenario that takes too long to be played beside the reference, twice.

    Another scenario of its task makes the same calls.
    """
    scenario.__dict__["is_played_once"] = True
    return scenario


def is_played_once(scenario: Callable[..., Any]) -> bool:
    """Whether it was marked."""
    return bool(getattr(scenario, "is_played_once", False))
