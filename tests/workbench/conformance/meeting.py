"""Ranks as threads of one process, which meet through a store that is not torch's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from distlab.comm import TcpComm
from distlab.comm.key_values import KeyValues, StoreByCalls
from distlab.comm.tcp.handshake import Identity, Talk, as_dialler

SECRET = bytes(range(32))
PATIENCE_S = 20.0


class DictStore(StoreByCalls):
    """A `Store` of this process, of which its service is asked without a socket."""

    def __init__(self) -> None:
        super().__init__(self._ask_service)
        self._service = KeyValues()
        self._changed = threading.Condition()

    def _ask_service(self, message: bytes, timeout_s: float) -> bytes:
        replies: list[bytes] = []

        def answered() -> bool:
            reply = self._service.handle(0, message)
            replies.extend([reply] if reply is not None else [])
            return bool(replies)

        with self._changed:
            if not self._changed.wait_for(answered, min(timeout_s, PATIENCE_S)):
                raise TimeoutError
            self._changed.notify_all()
        return replies[0]

    def address(self, rank: int) -> tuple[str, int]:
        address = self.get(f"tcp/{rank}", timeout_s=PATIENCE_S)
        host, _, port = address.decode().partition("|")
        return host, int(port)


def join(store: DictStore, rank: int, world_size: int, **how: Any) -> TcpComm:
    settings = {"secret": SECRET, "timeout_s": PATIENCE_S, **how}
    return TcpComm.from_store(store, rank, world_size, **settings)


def ranks(
    program: Callable[[TcpComm], Any],
    world_size: int,
    *,
    store: DictStore | None = None,
    only: tuple[int, ...] | None = None,
) -> list[Any]:
    """Run `program(comm)` on every rank, or on some while others are played."""
    meet = store or DictStore()

    def live(rank: int) -> Any:
        comm = join(meet, rank, world_size)
        try:
            return program(comm)
        finally:
            comm.close()

    chosen = only if only is not None else tuple(range(world_size))
    with ThreadPoolExecutor(len(chosen)) as pool:
        return [*pool.map(live, chosen)]


def speak(talk: Talk, connection: socket.socket) -> int:
    """Go through one side of a handshake; gives the peer."""
    words = b""
    try:
        say, needs = next(talk)
        while True:
            connection.sendall(say)
            words = b""
            while len(words) < needs:
                piece = connection.recv(needs - len(words))
                if not piece:
                    raise EOFError
                words += piece
            say, needs = talk.send(words)
    except StopIteration as end:
        return int(end.value)


def dial(store: DictStore, rank: int, peer: int, world_size: int) -> socket.socket:
    """A bare connection from `rank`, which has the secret, to `peer`."""
    connection = socket.create_connection(store.address(peer), timeout=PATIENCE_S)
    speak(as_dialler(Identity(SECRET, rank, world_size), peer), connection)
    return connection
