"""On which nodes the ranks of a check are, so that LOCAL_RANK is not RANK."""

from __future__ import annotations

_RANKS = 2


def ranks_per_node(world_size: int) -> int:
    """Two on each node, and of two ranks one on each."""
    return _RANKS if world_size > _RANKS else 1


def local_rank(rank: int, world_size: int) -> int:
    """A rank's number on its node."""
    return rank % ranks_per_node(world_size)
