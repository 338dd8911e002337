"""The simulated cluster: up to 4,096 ranks in one process and in virtual time."""

from distlab.sim.comm import SimComm
from distlab.sim.fabric import Fabric
from distlab.sim.faults import Faults
from distlab.sim.links import AlphaBeta, Network, Wires
from distlab.sim.loggp import LogGP
from distlab.sim.messages import Message, Trace
from distlab.sim.packed import run_apart
from distlab.sim.payload import Sized
from distlab.sim.piecewise import Piecewise
from distlab.sim.run import SimRun, run
from distlab.sim.spec import parse_faults, parse_net

__all__ = [
    "AlphaBeta",
    "Fabric",
    "Faults",
    "LogGP",
    "Message",
    "Network",
    "Piecewise",
    "SimComm",
    "SimRun",
    "Sized",
    "Trace",
    "Wires",
    "parse_faults",
    "parse_net",
    "run",
    "run_apart",
]
