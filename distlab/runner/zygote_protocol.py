"""How a request to the zygote is framed, known to both sides.

    start     fork all processes of a run: ranks first, then services
    again     fork one of them once more, which has died
    signal    send one of them a signal: only who collects the dead cannot hit another
    end       end them all
    preload   import modules

Descriptors travel with "start" and "again": controls, then outputs, then listeners.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

from distlab.runner.wire import encode

HEADER = struct.Struct("!II")  # length of the request, number of descriptors with it


def send_request(
    zygote: socket.socket, request: dict[str, Any], descriptors: list[int] | None = None
) -> None:
    """Send a request; `zygote` must block.

    Raises:
        OSError: the zygote is gone.
    """
    body = encode(request)
    head = HEADER.pack(len(body), len(descriptors or []))
    socket.send_fds(zygote, [head], descriptors or [])
    zygote.sendall(body)
