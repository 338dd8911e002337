"""What carries the bytes between ranks: one file per transport, and their table.

Nothing here imports torch until a transport is opened, so a launcher may look one up.
"""

from distlab.transports.table import (
    Meeting,
    Transport,
    find_transport,
    load_ours,
    register_transport,
    transport_names,
)

__all__ = [
    "Meeting",
    "Transport",
    "find_transport",
    "load_ours",
    "register_transport",
    "transport_names",
]
