"""TcpComm: plain sockets, a shared secret, length-limited frames, and no pickle.

Read in this order: `comm` (the calls), `flights` (transfers in progress), `exchange`
and `peers` (match sends with receives), `engine` and `line` (move the bytes), `frames`
(the format on the wire), `mesh` and `handshake` (how the ranks find and trust each
other).

Calls have separate connections: `endpoint` (the interface), `caller` and `server` (both
ends), `desk` (decides what to answer, and when), `sealed` (frames).
"""

from distlab.comm.tcp.comm import TcpComm
from distlab.comm.tcp.mesh import MeetingError

__all__ = ["MeetingError", "TcpComm"]
