"""Number the nodes when you only name a meeting place, as torchrun's c10d does.

Node 0 is the machine that owns the address. It numbers the other nodes as they arrive.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from dataclasses import replace

from distlab.launch.config import LaunchConfig, LaunchError
from distlab.launch.nodes import Client
from distlab.launch.stores import is_own, listen


def numbered(
    config: LaunchConfig, give_up: Callable[[], bool]
) -> tuple[LaunchConfig, socket.socket | None]:
    """Fill in the node_rank; on node 0, also return the socket where agents meet.

    Raises:
        LaunchError: node 0 doesn't answer, or already has all of its nodes.
    """
    if not config.any_node:
        return config, None
    if is_own(config.master_addr):
        try:
            listener = listen(config.listens_on, config.meeting_port)
        except LaunchError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
                raise
        else:  # if the port is in use, another agent on this machine came first
            return replace(config, node_rank=0, any_node=False), listener
    client = Client(config)
    until = time.monotonic() + config.start_timeout
    node = 1  # if a signal stops us, any number will do
    try:
        if client.reach(until, give_up):
            node = client.seat(until)
    finally:
        client.close()
    return replace(config, node_rank=node, any_node=False), None
