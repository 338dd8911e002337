"""Warm ranks: N real processes in a tenth of a second, and how they ended.

    with Cluster() as cluster:
        run = cluster.run(program, 4)
        run.require_finished().values

`program` is a module-level function of a `RankContext`; it runs once per rank.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distlab.runner.cluster import Cluster
    from distlab.runner.context import RankContext
    from distlab.runner.limits import Limits
    from distlab.runner.record import (
        ErrorRecord,
        NotFinishedError,
        RankRecord,
        Run,
        RunCancelledError,
        RunnerError,
    )

_HOMES = {
    "Cluster": "cluster",
    "ErrorRecord": "record",
    "Limits": "limits",
    "NotFinishedError": "record",
    "RankContext": "context",
    "RankRecord": "record",
    "Run": "record",
    "RunCancelledError": "record",
    "RunnerError": "record",
}

__all__ = [
    "Cluster",
    "ErrorRecord",
    "Limits",
    "NotFinishedError",
    "RankContext",
    "RankRecord",
    "Run",
    "RunCancelledError",
    "RunnerError",
]


def __getattr__(name: str) -> Any:
    # Only what is asked for is imported: the zygote can be started, and imports torch,
    # before this process begins to import torch itself.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
