"""TcpComm: plain sockets, a shared secret, length-limited frames, no pickle.

Read in this order: `comm` (the calls), `flights` (what is under way), `exchange` and
`peers` (who gives what to whom), `engine` and `line` (who moves the bytes), `frames`
(what is on the wire), `mesh` and `handshake` (how the ranks find and trust each other).

Calls have separate connections: `endpoint` (who calls whom), `caller` and `server`
(both ends), `desk` (what is answered, and when), `sealed` (frames).
"""

from distlab.comm.tcp.comm import TcpComm
from distlab.comm.tcp.mesh import MeetingError

__all__ = ["MeetingError", "TcpComm"]
