"""Ranks as threads of one process, which meet through a store that is not torch's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from distlab.comm import TcpComm
from distlab.comm.tcp.handshake import Identity, Talk, as_dialler

SECRET = bytes(range(32))
PATIENCE_S = 20.0


class DictStore:
    """The least that `TcpComm.from_store` needs."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        def here() -> bool:
            return all(key in self._values for key in keys)

        with self._changed:
            if not self._changed.wait_for(here, timeout.total_seconds()):
                raise TimeoutError

    def get(self, key: str) -> bytes:
        return self._values[key].encode()

    def address(self, rank: int) -> tuple[str, int]:
        self.wait([f"tcp/{rank}"], timedelta(seconds=PATIENCE_S))
        host, _, port = self._values[f"tcp/{rank}"].partition("|")
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
