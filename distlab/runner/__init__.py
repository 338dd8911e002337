"""Warm ranks: N real processes in a tenth of a second, and how they ended.

    with Cluster() as cluster:
        run = cluster.run(program, 4)
        run.require_finished().values

`program` is a module-level function of a `RankContext`; it runs once per rank.
"""

from distlab.runner.cluster import Cluster
from distlab.runner.context import RankContext
from distlab.runner.limits import Limits
from distlab.runner.record import ErrorRecord, RankRecord, Run, RunnerError

__all__ = [
    "Cluster",
    "ErrorRecord",
    "Limits",
    "RankContext",
    "RankRecord",
    "Run",
    "RunnerError",
]
