"""The smallest program for several ranks, in which each introduces itself."""

from __future__ import annotations

import os

from distlab.runner import RankContext


def introduce(context: RankContext) -> None:
    """Print the rank; every rank runs these same lines."""
    rank, world_size = context.rank, context.world_size
    mine = range(rank, 1437, world_size)
    first = ", ".join(str(sample) for sample in mine[:3])
    who = f"rank {rank} of {world_size}   pid {os.getpid()}"
    context.report(f"{who}   I own samples {first}, …")
