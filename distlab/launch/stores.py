"""Keep the store at MASTER_PORT where torch.distributed's ranks meet.

With TORCHELASTIC_USE_AGENT_STORE=True in a rank's environment, init_process_group makes
every rank a client, including rank 0, so the store outlives each rank. Each generation
has a new store, so everything that the previous generation set is gone.

Source: torch/distributed/rendezvous.py, _create_c10d_store.
"""

from __future__ import annotations

import errno
import socket
from datetime import timedelta
from typing import Any

from distlab.launch.config import LaunchConfig, LaunchError

_BACKLOG = 1024
_TIMEOUT = timedelta(seconds=60)


def listen(address: str, port: int) -> socket.socket:
    """Listen on `address` only; if the port is 0, take a free one.

    Raises:
        LaunchError: the port is in use, or the address isn't this node's.
    """
    listener = None
    try:
        family, where = _resolved(address, port)
        listener = socket.socket(family, socket.SOCK_STREAM)
        # A port whose last connections are ending is free again.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not address:  # IPv4 too
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:
        if listener is not None:
            listener.close()
        raise LaunchError(_why_not(address, port, error)) from error
    return listener


def is_own(address: str) -> bool:
    """Return True if this node has the address, or has one that the name stands for."""
    try:
        family, where = _resolved(address, 0)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(where)
    except (OSError, UnicodeError):
        return False
    return True


def open_store(config: LaunchConfig) -> Store:
    """Open node 0's store, at master_port unless the agents meet there.

    Raises:
        LaunchError: as in `listen`.
    """
    port = config.master_port if config.nnodes == 1 else 0
    try:
        return Store(config.master_addr, port, config.listens_on)
    except LaunchError as error:
        is_taken = isinstance(error.__cause__, OSError) and (
            error.__cause__.errno == errno.EADDRINUSE
        )
        if not (config.any_port and is_taken):
            raise
    return Store(config.master_addr, 0, config.listens_on)


class Store:
    """A torch.distributed store for the ranks, one for each generation."""

    def __init__(self, address: str, port: int, listens_on: str | None = None) -> None:
        """Take the port on `address`, where the ranks will look, or another one.

        Raises:
            LaunchError: as in `listen`.
        """
        self.address = address
        self._listens_on = address if listens_on is None else listens_on
        self._listener: socket.socket | None = listen(self._listens_on, port)
        self.port: int = self._listener.getsockname()[1]
        self._daemon: Any = None

    def begin(self) -> None:
        """Open an empty store for a generation whose ranks are about to start.

        Raises:
            LaunchError: the port was taken between two generations.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._daemon = None  # its destructor closes the port
        listener = self._listener or listen(self._listens_on, self.port)
        self._listener = None
        self._daemon = TCPStore(
            self.address,
            self.port,
            None,
            True,
            _TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._num_keys = self._daemon.num_keys()

    @property
    def was_used(self) -> bool:
        """Return True if a rank of this generation has set a value in order to meet."""
        return bool(self._daemon is None or self._daemon.num_keys() > self._num_keys)

    def close(self) -> None:
        """Release the port."""
        self._daemon = None
        if self._listener is not None:
            self._listener.close()


def _resolved(address: str, port: int) -> tuple[int, Any]:
    """Return the family and socket address; without an address, use all of them."""
    if not address:
        if socket.has_dualstack_ipv6():
            return socket.AF_INET6, ("::", port)
        return socket.AF_INET, ("", port)
    # Prefer IPv4 if a name has both, because gloo and torch's store do so too.
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    family, _, _, _, where = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, where


def _why_not(address: str, port: int, error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError):
        return f"master_addr {address!r} is not the name of a machine"
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {address} is in use: name another one with "
            "--master-port, or end the program that has it"
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.EINVAL):
        return (
            f"master_addr {address} is no address of this node, and node 0 keeps the "
            "store there: is --node-rank right?"
        )
    if isinstance(error, socket.gaierror):
        return f"master_addr {address!r} cannot be looked up: {error.strerror}"
    reason = error.strerror or type(error).__name__
    return f"port {port} of {address} cannot be opened: {reason}"
