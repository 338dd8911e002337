"""`python -m distlab.launch`: start ranks on one or several nodes, and restart them.

config      LaunchConfig and its checks; slurm: settings that srun makes
arguments   the command line
launcher    DistributedLauncher: one agent per node, and its loop
decisions   process_group.launch decides: the learner's Launcher, or the reference's
ranks       the processes of this node; boot: the program that each of them runs first
logs        rank_<r>.log, and the terminal; report: messages about failures
streams     its own output; interrupts: Ctrl-C before there are ranks
stores      the store at MASTER_PORT, kept by an agent, which isn't a rank
nodes       how agents on several nodes meet through process_group.rendezvous
hub         node 0's agent if all ranks restart; follower: that of every other node
agent       node 0's agent under --standby and --elastic; host: a node's processes;
            hosts: those of all nodes
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
    """Return a script that tests a launcher, ours or torchrun."""
    return Path(__file__).with_name("selftest.py")


def __getattr__(name: str) -> Any:
    # The launcher imports torch: when it is asked for, so that __main__ hears Ctrl-C.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from distlab.launch import launcher

    return getattr(launcher, name)
