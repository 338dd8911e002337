"""Our own transport, over plain sockets."""

from __future__ import annotations

from distlab.transports.table import Comm, Meeting, register_transport


def open_tcp(meeting: Meeting) -> Comm:
    """Connect to the other ranks, all of which must call this."""
    from distlab.comm import TcpComm

    store, secret = meeting.own_store()
    return TcpComm.from_store(
        store,
        meeting.rank,
        meeting.world_size,
        secret=secret,
        host=meeting.host,
        timeout_s=meeting.timeout_s,
        local_rank=meeting.local_rank,
    )


register_transport("tcp", open_tcp, title="distlab.comm.tcp, over plain sockets")
