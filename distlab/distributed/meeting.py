"""Run the course's own store: rank 0's process keeps it, and every rank asks it.

    torch's store    "meeting" = host|port|secret          written by rank 0
    Rendezvous       "tcp/0", "tcp/1", …                   where each rank listens

The requests are those of the task process_group.rendezvous, as JSON in sealed frames.
"""

from __future__ import annotations

import _thread
import json
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distlab.comm import PeerLost
from distlab.comm.tcp.endpoint import STORE, Directory, TcpEndpoint
from distlab.comm.tcp.server import Server
from distlab.distributed.environment import Place, family_of
from distlab.distributed.parts import UnitError, running, unit

_KEY = "meeting"


class RendezvousStore:
    """A `Store` whose values the course's Rendezvous keeps, in one generation."""

    def __init__(
        self, endpoint: TcpEndpoint, generation: int, timeout_s: float
    ) -> None:
        self._endpoint, self._generation = endpoint, generation
        self._timeout_s = timeout_s

    def set(self, key: str, value: bytes) -> None:
        """Implement `Store.set`."""
        self._ask(None, op="set", key=key, value=value.decode())

    def get(self, key: str, *, timeout_s: float | None = None) -> bytes:
        """Implement `Store.get`."""
        return str(self._ask(timeout_s, op="get", key=key)).encode()

    def wait(self, keys: Sequence[str], *, timeout_s: float | None = None) -> None:
        """Implement `Store.wait`."""
        self._ask(timeout_s, op="wait", keys=list(keys))

    def add(self, key: str, amount: int) -> int:
        """Implement `Store.add`."""
        return int(self._ask(None, op="add", key=key, amount=amount))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Implement `Store.compare_set`."""
        values = {"expected": expected.decode(), "value": desired.decode()}
        return str(self._ask(None, op="compare_set", key=key, **values)).encode()

    def _ask(self, timeout_s: float | None, **request: Any) -> Any:
        message = json.dumps({"generation": self._generation, **request}).encode()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            reply = json.loads(self._endpoint.call(STORE, message, limit_s))
        except PeerLost:
            raise
        except RuntimeError as error:  # its `handle` raised an error
            said = str(error).partition(f"{UnitError.__name__}: ")[2]
            raise UnitError(said or str(error)) from error
        if "refused" in reply:
            raise ValueError(f"the store refuses this rank: {reply['refused']}")
        return reply["reply"]


@dataclass(frozen=True)
class Keeper:
    """The store of a meeting and its secret, and on rank 0 the server behind it."""

    store: RendezvousStore
    secret: bytes
    endpoint: TcpEndpoint
    server: Server | None

    def close(self) -> None:
        """Close the connections, and on rank 0 also the server."""
        self.endpoint.close()
        if self.server is not None:
            self.server.stop()


def meet(base: Any, place: Place, host: str, timeout_s: float) -> Keeper:
    """Create or find the store of this meeting, which rank 0's process keeps.

    `base` is torch's store, from which we read the job's secret. If others can reach
    that store, set DISTLAB_SECRET on every rank, so that the secret isn't sent.
    """
    server, given = None, os.environ.get("DISTLAB_SECRET", "").encode()
    if place.rank == 0:
        secret = given or secrets.token_bytes(32)
        server, port = _serve(host, secret, place.world_size)
        base.set(_KEY, f"{host}|{port}|{'' if given else secret.hex()}")
    where, port_text, key = base.get(_KEY).decode().split("|")
    directory = Directory(
        addresses={STORE: (where, int(port_text))},
        secret=given or bytes.fromhex(key),
        world_size=place.world_size,
    )
    endpoint = TcpEndpoint(directory, place.rank)
    store = RendezvousStore(endpoint, place.generation, timeout_s)
    return Keeper(store, directory.secret, endpoint, server)


def _serve(host: str, secret: bytes, world_size: int) -> tuple[Server, int]:
    rendezvous = unit("process_group").Rendezvous(world_size)

    def handle(peer: int, message: bytes) -> bytes | None:
        with running():
            reply: bytes | None = rendezvous.handle(peer, message)
        return reply

    try:
        listener = socket.create_server((host, 0), family=family_of(host))
    except OSError as error:
        raise ValueError(
            f"rank 0 can't listen at {host}: {error.strerror}; if DISTLAB_HOST is set, "
            "it must be an address of this machine"
        ) from error
    identity = Directory(addresses={}, secret=secret, world_size=world_size).identity()
    server = Server(listener, identity, STORE, handle)
    port = int(listener.getsockname()[1])

    def run() -> None:
        server.run()
        server.close()

    # Below `threading`, as TcpEndpoint's: the program's end does not wait for it.
    _thread.start_new_thread(run, ())
    return server, port
