"""What the tests of `distlab.distributed` run in ranks have in common."""

from __future__ import annotations

from typing import Any

import distlab.distributed as dist
from distlab.grading.kit.torchrun_env import like_torchrun
from distlab.runner import Cluster, Limits, RankContext

PATIENCE_S = 60.0
PATIENT = Limits(seconds=300)


def begin(context: RankContext, backend: str = "gloo") -> tuple[int, int]:
    """Make the default group; this rank and the number of ranks."""
    like_torchrun(context, PATIENCE_S)
    dist.init_process_group(backend, timeout_s=PATIENCE_S)
    return context.rank, context.world_size


def ranks(cluster: Cluster, program: Any, n: int, *arguments: Any) -> list[Any]:
    """What `program` returned on each of n ranks."""
    run = cluster.run(program, n, *arguments, limits=PATIENT).require_finished()
    return list(run.values)
