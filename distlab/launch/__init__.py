"""`python -m distlab.launch`: ranks on one node or several, their logs, restarts.

config      LaunchConfig, and what it refuses; slurm: what srun says instead
arguments   the command line
launcher    DistributedLauncher: one agent per node, and its loop
decisions   task 3.18 decides: the learner's Launcher, or the reference's
ranks       the processes of this node; boot: the first thing that each of them runs
logs        rank_<r>.log, and the terminal; report: why it gave up
stores      the store at MASTER_PORT, kept by an agent, which is no rank
nodes       agents on several nodes meet through task 3.17
"""

from pathlib import Path

from distlab.launch.config import LaunchConfig, LaunchError
from distlab.launch.launcher import DistributedLauncher, launch_distributed_training
from distlab.launch.slurm import rank_environment

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
