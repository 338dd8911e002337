"""The simulated cluster: up to 4,096 ranks in one thread and in virtual time."""

from distlab.sim.channels import Message
from distlab.sim.comm import SimComm
from distlab.sim.links import AlphaBeta, Network, Wires
from distlab.sim.packed import run_apart
from distlab.sim.run import SimRun, run

__all__ = [
    "AlphaBeta",
    "Message",
    "Network",
    "SimComm",
    "SimRun",
    "Wires",
    "run",
    "run_apart",
]
