"""Implement Endpoint and Store in a real process: call ranks and services by name.

    directory   who listens where; the job's runner has made the listeners, with ports
                that the system chose, before it started anybody
    endpoint    calls whoever is in the directory, and serves its own listener
    store       calls the service "store", which belongs to no rank

We don't open a connection or start a thread before we need it.
"""

from __future__ import annotations

import _thread
import contextlib
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from distlab.comm._protocol import PeerLost
from distlab.comm.key_values import StoreByCalls
from distlab.comm.tcp.caller import Address, Caller, GoneError
from distlab.comm.tcp.handshake import NO_RANK, Identity, name_of
from distlab.comm.tcp.sealed import MAX_FRAME_BYTES
from distlab.comm.tcp.server import Server

STORE = "store"
"""The name of the service that keeps the store."""


@dataclass(frozen=True, kw_only=True)
class Directory:
    """The addresses that every process of a job knows, under the job's secret."""

    addresses: Mapping[str, Address]  # by name: "rank 0", "store", …
    secret: bytes = field(repr=False)
    world_size: int
    max_frame_bytes: int = MAX_FRAME_BYTES

    def identity(self, rank: int = NO_RANK) -> Identity:
        """Return the identity that a rank or a newcomer has to prove."""
        return Identity(self.secret, rank, self.world_size)


class TcpEndpoint:
    """An `Endpoint`; with `NO_RANK` as its `rank` it can only call, not serve.

    On real processes, a service's `handle` runs in a separate thread beside its rank's
    program, so anything that both use must be thread-safe.
    """

    def __init__(
        self,
        directory: Directory,
        rank: int = NO_RANK,
        listener: socket.socket | None = None,
    ) -> None:
        self._directory, self._rank, self._listener = directory, rank, listener
        self._callers: dict[str, Caller] = {}
        self._lock = threading.Lock()
        self._step = 0
        self._handle: Callable[[int, bytes], bytes | None] | None = None
        self._server: Server | None = None
        self._served = _thread.allocate_lock()  # held while the thread serves
        self._serving_thread = 0
        self.on_wait: Callable[[int, str, float], Callable[[], None]] | None = None
        """Called when a service says "not yet", with the number of the call, the name
        and the time that is left; what it returns is called when the call is over."""

    @property
    def doors(self) -> frozenset[Address]:
        """Return all addresses that you can call."""
        return frozenset(self._directory.addresses.values())

    @property
    def is_answering(self) -> bool:
        """Return True if a `handle` is making the call, since that may not wait."""
        return self._serving_thread == _thread.get_ident()

    def call(self, peer: int | str, message: bytes, timeout_s: float) -> bytes:
        """Implement `Endpoint.call`.

        Raises:
            ValueError: there is no such rank or service, or the message is larger than
                a frame.
            TypeError: the message isn't bytes.
            PeerLost: as in `Endpoint.call`.
            RuntimeError: the peer's `handle` raised an error, or you called this in a
                `handle`.
        """
        caller = self._caller(peer)
        if not isinstance(message, bytes):
            raise TypeError(f"a message is bytes, not {type(message).__name__}")
        self.require_free()
        self._step += 1
        started, number = time.monotonic(), self._step
        over: list[Callable[[], None]] = []

        def wait() -> None:
            if self.on_wait and not over:
                over.append(self.on_wait(number, name_of(peer), timeout_s))

        try:
            return caller.call(message, started + timeout_s, wait)
        except (GoneError, TimeoutError) as error:
            waited_s = time.monotonic() - started
            raise PeerLost(self._rank, self._step, peer, waited_s) from error
        finally:
            for end in over:
                end()

    def serve(self, handle: Callable[[int, bytes], bytes | None]) -> None:
        """Implement `Endpoint.serve`.

        Raises:
            ValueError: this endpoint has no listener.
        """
        if self._listener is None:
            raise ValueError("who has no rank is called by nobody: serve as a rank")
        with self._lock:
            self._handle = handle
            if self._server is None:
                self._server = Server(
                    self._listener,
                    self._directory.identity(self._rank),
                    name_of(self._rank),
                    self._answer,
                    max_frame_bytes=self._directory.max_frame_bytes,
                )
                self._served.acquire()
                # Below `threading`: it is the transport's, no thread of the program.
                _thread.start_new_thread(self._run, (self._server,))

    def finish(self) -> None:
        """Stop serving because the rank's program has ended; keep connections open."""
        if self._server is not None:
            self._server.stop()
            with self._served:  # the last answer is complete
                pass

    def close(self) -> None:
        """Close everything that this endpoint opened; safe to call twice."""
        self.finish()
        server, self._server = self._server, None
        if server is not None:
            server.close()
        elif self._listener is not None:
            self._listener.close()
        self._listener = None
        for caller in self._callers.values():
            caller.close()

    def require_free(self) -> None:
        """Refuse to wait inside a `handle`.

        Raises:
            RuntimeError: the caller is a `handle`.
        """
        if self.is_answering:
            raise RuntimeError("what serves a call answers at once: it cannot wait")

    def _answer(self, peer: int, message: bytes) -> bytes | None:
        assert self._handle is not None
        return self._handle(peer, message)

    def _run(self, server: Server) -> None:
        self._serving_thread = _thread.get_ident()
        try:
            server.run()
        except BaseException:
            with contextlib.suppress(Exception):
                print("the thread that answers calls has ended:", file=sys.stderr)
                traceback.print_exc()
        finally:
            self._serving_thread = 0
            self._served.release()

    def _caller(self, peer: int | str) -> Caller:
        name, directory = name_of(peer), self._directory
        with self._lock:
            if name not in self._callers:
                if name not in directory.addresses:
                    raise ValueError(self._nobody(peer))
                self._callers[name] = Caller(
                    directory.addresses[name],
                    directory.identity(self._rank),
                    name,
                    max_frame_bytes=directory.max_frame_bytes,
                )
            return self._callers[name]

    def _nobody(self, peer: int | str) -> str:
        whom = f'"{peer}"' if isinstance(peer, str) else f"rank {peer}"
        known = self._directory.addresses
        names = [name for name in known if name[:5] != "rank " and name != STORE]
        also = f" and {', '.join(names)}" if names else ""
        last = self._directory.world_size - 1
        return f"call to {whom}, but there is only rank 0 … {last}{also}"


def store_of(endpoint: TcpEndpoint) -> StoreByCalls:
    """Return the `Store` of the job that `endpoint` belongs to."""

    def ask(message: bytes, timeout_s: float) -> bytes:
        return endpoint.call(STORE, message, timeout_s)

    return StoreByCalls(ask)
