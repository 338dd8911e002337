"""`distlab mcp`: the tutor as a server that an assistant starts and talks to."""

from __future__ import annotations


def mcp() -> int:
    """Serve until the assistant closes standard input.

    Raises:
        ModuleNotFoundError: the extra `mcp` isn't installed; the message is one line.
    """
    from distlab.tutor.server import make_server

    make_server().run("stdio")
    return 0
