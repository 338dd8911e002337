"""Where the processes of a run can be called: listeners made before anybody starts.

The parent makes them and hands each process its own. So ports are known to all from the
start, the system chooses them, and a rank under the guard need not open any. A process
that dies takes its listener along: whoever calls it is told so at once. The parent
keeps the port itself (bound, not listening) for the process that takes its place.
"""

from __future__ import annotations

import socket

_HOST = "127.0.0.1"
_BACKLOG = 128


class Door:
    """A port of this machine for one process after another."""

    def __init__(self) -> None:
        self._kept = _bound(0)
        self.address: tuple[str, int] = self._kept.getsockname()

    def listen(self) -> socket.socket:
        """A listener on the port, for a process of its own."""
        listener = _bound(self.address[1])
        listener.listen(_BACKLOG)
        return listener

    def close(self) -> None:
        """Give the port back."""
        self._kept.close()


def _bound(port: int) -> socket.socket:
    one = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Two sockets may have one port then, of which only one listens.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        one.bind((_HOST, port))
    except BaseException:
        one.close()
        raise
    return one
