"""`python -m distlab.launch`: ranks on one node or several, their logs, restarts.

config      LaunchConfig, and what it refuses; slurm: what srun says instead
arguments   the command line
launcher    DistributedLauncher: one agent per node, and its loop
decisions   task 3.18 decides: the learner's Launcher, or the reference's
ranks       the processes of this node; boot: the first thing that each of them runs
logs        rank_<r>.log, and the terminal; report: why it gave up
streams     what it says itself; interrupts: Ctrl-C before there are ranks
stores      the store at MASTER_PORT, kept by an agent, which is no rank
nodes       agents on several nodes meet through task 3.17
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.launch.config import LaunchConfig, LaunchError
from distlab.launch.slurm import rank_environment

if TYPE_CHECKING:
    from distlab.launch.launcher import (
        DistributedLauncher,
        launch_distributed_training,
    )

__all__ = [
    "DistributedLauncher",
    "LaunchConfig",
    "LaunchError",
    "launch_distributed_training",
    "rank_environment",
    "selftest_script",
]


def selftest_script() -> Path:
    """A script with which a launcher, this one or torchrun, can be tried."""
    return Path(__file__).with_name("selftest.py")


def __getattr__(name: str) -> Any:
    # The launcher imports torch: when it is asked for, so that __main__ hears Ctrl-C.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from distlab.launch import launcher

    return getattr(launcher, name)
