"""The simulated cluster: up to 4,096 ranks in one process and in virtual time.

Read in this order: `run` (the entry point), `kernel` (which rank runs, and when),
`carriers` (greenlets or threads under a rank), `channels` (match sends and receives),
`comm` (the calls; `fast` is a shortcut through it). Beside these, `net` computes the
time of a message, `faults` describes failures, `plans` has schedules and their
formulas, `calibration` measures this machine, and `torch` runs torch.distributed's
code.
"""

from distlab.sim.comm import SimComm
from distlab.sim.crash_points import CrashPoint, crash_points
from distlab.sim.disk import SimDisk
from distlab.sim.faults import Faults
from distlab.sim.messages import Message, Trace
from distlab.sim.net.fabric import Fabric
from distlab.sim.net.links import AlphaBeta, Network, Wires
from distlab.sim.net.loggp import LogGP
from distlab.sim.net.piecewise import Piecewise
from distlab.sim.net.spec import parse_faults, parse_net
from distlab.sim.packed import run_apart
from distlab.sim.payload import Sized
from distlab.sim.run import SimRun, run
from distlab.sim.scripts import random_script, script_text, shrink

__all__ = [
    "AlphaBeta",
    "CrashPoint",
    "Fabric",
    "Faults",
    "LogGP",
    "Message",
    "Network",
    "Piecewise",
    "SimComm",
    "SimDisk",
    "SimRun",
    "Sized",
    "Trace",
    "Wires",
    "crash_points",
    "parse_faults",
    "parse_net",
    "random_script",
    "run",
    "run_apart",
    "script_text",
    "shrink",
]
