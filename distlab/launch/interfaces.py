"""Find the network interface that leads to an address, whose name gloo needs."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys

_SIOCGIFADDR = 0x8915  # Linux
_NAME_BYTES = 16


def interface_to(address: str) -> str:
    """Return the name of the interface through which we reach `address`.

    The name is empty if the system doesn't tell us. Only Linux does, for IPv4 and for
    the IPv6 loopback.
    Example: 127.0.0.1 → lo
    """
    if address == "::1" and sys.platform.startswith("linux"):
        return "lo"
    own = address_to(address)
    if not own or not sys.platform.startswith("linux"):
        return ""
    for _, name in socket.if_nameindex():
        if _address_of(name) == own or (name == "lo" and own.startswith("127.")):
            return name
    return ""


def address_to(address: str) -> str:
    """Return this node's own address on the way to `address`; this sends nothing."""
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.connect((address, 9))
        return str(probe.getsockname()[0])
    return ""


def _address_of(name: str) -> str:
    import fcntl

    request = struct.pack(f"{_NAME_BYTES}s24x", name.encode()[: _NAME_BYTES - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError:  # it has none
            return ""
    return socket.inet_ntoa(reply[20:24])
