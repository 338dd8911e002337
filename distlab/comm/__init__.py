"""The interface through which your code communicates, and its transports.

Each rank gets a `Comm`. `TorchComm` implements it over torch.distributed with gloo or
NCCL, and `TcpComm` implements it over plain sockets. You can wrap any Comm in a
`Journal`, a `ByteMeter` or `PointToPointOnly`.
"""

from distlab.comm._call import COLLECTIVES, Call, Wrapper
from distlab.comm._default_group import leave_default_group, open_default_group
from distlab.comm._disk import Disk, DiskError
from distlab.comm._protocol import (
    ANY,
    SUM,
    Comm,
    CommRefusedError,
    PeerLost,
    ReduceOp,
    Work,
)
from distlab.comm._real_disk import RealDisk
from distlab.comm._seams import Clock, Endpoint, RealClock, Store
from distlab.comm._torch import TorchComm
from distlab.comm._wrappers import ByteMeter, Event, Journal, PointToPointOnly, Traffic
from distlab.comm.services import (
    Factory,
    Handle,
    Pending,
    Reacts,
    Request,
    Service,
    ServiceContext,
)
from distlab.comm.tcp import MeetingError, TcpComm

__all__ = [
    "ANY",
    "COLLECTIVES",
    "SUM",
    "ByteMeter",
    "Call",
    "Clock",
    "Comm",
    "CommRefusedError",
    "Disk",
    "DiskError",
    "Endpoint",
    "Event",
    "Factory",
    "Handle",
    "Journal",
    "MeetingError",
    "PeerLost",
    "Pending",
    "PointToPointOnly",
    "Reacts",
    "RealClock",
    "RealDisk",
    "ReduceOp",
    "Request",
    "Service",
    "ServiceContext",
    "Store",
    "TcpComm",
    "TorchComm",
    "Traffic",
    "Work",
    "Wrapper",
    "leave_default_group",
    "open_default_group",
]
