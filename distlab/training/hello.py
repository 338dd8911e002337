"""The smallest program for several ranks: each says who it is."""

from __future__ import annotations

import os

from distlab.runner import RankContext


def introduce(context: RankContext) -> None:
    """What every rank runs: the same lines, another rank."""
    rank, world_size = context.rank, context.world_size
    mine = range(rank, 1437, world_size)
    first = ", ".join(str(sample) for sample in mine[:3])
    who = f"rank {rank} of {world_size}   pid {os.getpid()}"
    context.report(f"{who}   I own samples {first}, …")
