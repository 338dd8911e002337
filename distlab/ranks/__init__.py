"""Choose the ranks that a program runs on: real processes, or simulated ones.

Real ranks are forked from a warm process, which needs Linux. Everywhere else, and if
the environment says DISTLAB_RANKS=simulated, `new_cluster` returns a cluster that runs
the same programs on the simulator, in a spawned process, which works on any system.
With DISTLAB_RANKS=spawned, each rank is a spawned process of its own, see spawned.py.
All of them return the same kind of `Run`, so a judge can't tell which one it reads.

    ours (new_cluster)  ── one JSON line per run ─▶  worker: all ranks of a run, as
      SimulatedCluster  ◀─ reports, values, run ──   threads of which one runs at a time

A learner's endless loop or crash ends the worker, and the next run starts another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distlab.runner.kind import ranks_kind

if TYPE_CHECKING:
    from distlab.runner import Cluster


def new_cluster(*, preload: tuple[str, ...] = ()) -> Cluster:
    """Return a cluster of the kind of ranks that this process uses; see `Cluster`.

    We don't import torch here, so the cluster can do so while we do something else.

    Raises:
        ValueError: DISTLAB_RANKS asks for ranks that don't exist.
    """
    if ranks_kind() == "real":
        from distlab.runner import Cluster

        return Cluster(preload=preload)
    if ranks_kind() == "spawned":
        from distlab.ranks.spawned import SpawnedCluster

        return SpawnedCluster(preload=preload)
    from distlab.ranks.simulated import SimulatedCluster

    return SimulatedCluster(preload=preload)
