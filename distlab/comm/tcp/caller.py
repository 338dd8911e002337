"""Call a service on a connection of its own, and reconnect when it breaks.

    call ──▶ connection at hand, or dial and prove ──▶ CALL … REPLY ──▶ connection kept

The caller numbers its requests. If a connection breaks before the reply, and the caller
can still reach the same life of the service, it resends the request under the same
number, so that the service handles it once. If that life has ended, nobody knows if the
request was handled. The call is then lost, and the program must decide what to do.

A service assumes that a caller without a connection has ended. So if an answer doesn't
come in time, we keep that connection until we use another one, and we keep a connection
to a new life of the service for the next call.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable

from distlab.comm.tcp.frames import FrameError
from distlab.comm.tcp.handshake import Identity, as_caller
from distlab.comm.tcp.sealed import (
    FROM_CALLER,
    FROM_SERVICE,
    MAX_FRAME_BYTES,
    Kind,
    Opener,
    Sealed,
    Sealer,
)
from distlab.comm.tcp.server import NAME_BYTES

Address = tuple[str, int]
_READ_BYTES = 1 << 18
_LONGEST_S = 2e6  # for a socket: poll(2) counts milliseconds in 32 bits
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.2  # between two tries to connect


class GoneError(Exception):
    """Raised if the service, or the life of it that has the request, is dead."""


class _Connection:
    """A connection that passed its handshake, with one request at a time."""

    def __init__(self, address: Address, until: float) -> None:
        try:
            self.socket = socket.create_connection(address, _left_s(until))
        except ConnectionRefusedError as error:
            raise GoneError("nobody listens there") from error
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.life = b""
        self._frames: list[Sealed] = []  # that have come and were not looked at
        self._sealer: Sealer
        self._opener: Opener

    def introduce(
        self, me: Identity, caller: bytes, service: str, limit: int, until: float
    ) -> None:
        """Complete the handshake, and learn which life of the service this is."""
        talk = as_caller(me, service)
        words, needs = next(talk)
        while True:
            heard = self._exactly(needs, until)
            try:
                words, needs = talk.send(heard)
            except StopIteration as end:
                key = end.value.key
                break
            self._send(words, until)
        self._sealer = Sealer(key, FROM_CALLER)
        self._opener = Opener(key, FROM_SERVICE, limit)
        self._send(self._sealer.seal(Kind.HELLO, caller), until)
        hello = self._next(until)
        if hello.kind != Kind.HELLO or len(hello.payload) != NAME_BYTES:
            raise FrameError("a service does not say HELLO first")
        self.life = hello.payload

    def ask(
        self,
        number: int,
        oldest: int,
        message: bytes,
        until: float,
        on_wait: Callable[[], None],
    ) -> Sealed:
        """Send a request and wait for its answer; call `on_wait` if it must wait."""
        call = self._sealer.seal(
            Kind.CALL,
            message,
            number=number,
            oldest=oldest,
            patience_s=max(0.0, until - time.monotonic()),
        )
        self._send(call, until)
        answer = self._next(until)
        while answer.kind == Kind.NOT_YET and answer.number == number:
            on_wait()
            answer = self._next(until)
        if answer.kind != Kind.REFUSED and answer.number != number:
            raise FrameError(f"an answer to {answer.number} came instead of {number}")
        return answer

    def is_quiet(self) -> bool:
        """Return True if nothing has come since the last answer, not even its end."""
        return not select.select([self.socket], [], [], 0)[0]

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def _next(self, until: float) -> Sealed:
        while not self._frames:
            self._frames += self._opener.feed(self._read(_READ_BYTES, until))
        frame = self._frames.pop(0)
        if self._frames and frame.kind != Kind.NOT_YET:
            raise FrameError("a service answers what nobody asked")
        return frame

    def _exactly(self, count: int, until: float) -> bytes:
        heard = b""
        while len(heard) < count:
            heard += self._read(count - len(heard), until)
        return heard

    def _read(self, most: int, until: float) -> bytes:
        self.socket.settimeout(_left_s(until))
        data = self.socket.recv(most)
        if not data:
            raise EOFError("the service closed the connection")
        return data

    def _send(self, data: bytes, until: float) -> None:
        self.socket.settimeout(_left_s(until))
        self.socket.sendall(data)


class Caller:
    """Calls one service from any number of threads, each on its own connection."""

    def __init__(
        self,
        address: Address,
        me: Identity,
        service: str,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._address, self._me, self._service = address, me, service
        is_rank = service.startswith("rank ")
        self._whom = service if is_rank else f'the service "{service}"'
        self._limit = max_frame_bytes
        self._name = secrets.token_bytes(NAME_BYTES)
        self._lock = threading.Lock()
        self._last_number = 0
        self._open: set[int] = set()  # numbers of requests that are not over
        self._idle: list[_Connection] = []
        self._late: list[_Connection] = []  # on which nothing is asked any more
        self.num_connections = 0  # made so far

    def call(
        self,
        message: bytes,
        until: float,
        on_wait: Callable[[], None] = lambda: None,
    ) -> bytes:
        """Let the service handle `message`; `until` is a time of `time.monotonic`.

        We call `on_wait` when the service says that it can't answer yet.

        Raises:
            GoneError: the service is dead, and we don't know if it handled the message.
            TimeoutError: no answer came in time, so we don't know that either.
            ValueError: the message is larger than a frame may be.
            RuntimeError: the service's `handle` raised an error.
            FrameError, StrangerError: the service refuses us, with its reason.
        """
        if len(message) > self._limit:
            raise ValueError(
                f"a message of {len(message)} bytes, more than {self._limit}: ask for "
                "more with max_frame_bytes, or send it in parts"
            )
        with self._lock:
            self._last_number += 1
            number = self._last_number
            self._open.add(number)
        try:
            return self._result(self._until_answered(number, message, until, on_wait))
        finally:
            with self._lock:
                self._open.discard(number)

    def close(self) -> None:
        """Close the connections that aren't in use."""
        with self._lock:
            idle, self._idle = self._idle + self._late, []
            self._late = []
        for connection in idle:
            connection.close()

    def _result(self, answer: Sealed) -> bytes:
        if answer.kind == Kind.REPLY:
            return answer.payload
        text = answer.payload.decode(errors="replace")
        if answer.kind == Kind.FAILED:
            raise RuntimeError(f"{self._whom} could not answer: {text}")
        raise FrameError(f"{self._whom} refuses this call: {text}")

    def _until_answered(
        self, number: int, message: bytes, until: float, on_wait: Callable[[], None]
    ) -> Sealed:
        pause_s, life = 0.0, b""
        while True:
            connection: _Connection | None = None
            try:
                connection = self._at_hand() or self._dial(until)
                if life and connection.life != life:
                    self._keep(connection)
                    raise GoneError("it was started anew, and does not know the call")
                life = connection.life
                with self._lock:
                    oldest = min(self._open)
                answer = connection.ask(number, oldest, message, until, on_wait)
            except TimeoutError:
                if connection is not None:
                    self._replace_late([connection])
                raise
            except GoneError:
                raise
            except PermissionError:
                _close(connection)
                raise
            except (OSError, EOFError):  # it broke: by the network, or by a death
                _close(connection)
            except BaseException:  # refused, or Ctrl-C: half a frame may be on its way
                _close(connection)
                raise
            else:
                self._put_back(connection, answer)
                return answer
            time.sleep(min(pause_s, max(0.0, until - time.monotonic())))
            pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * pause_s))

    def _at_hand(self) -> _Connection | None:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None or connection.is_quiet():
                return connection
            connection.close()

    def _dial(self, until: float) -> _Connection:
        connection = _Connection(self._address, until)
        try:
            connection.introduce(
                self._me, self._name, self._service, self._limit, until
            )
        except BaseException:
            connection.close()
            raise
        self.num_connections += 1
        return connection

    def _put_back(self, connection: _Connection, answer: Sealed) -> None:
        if answer.kind == Kind.REFUSED:
            connection.close()
            return
        self._replace_late([])  # the service knows this connection: it has answered
        self._keep(connection)

    def _keep(self, connection: _Connection) -> None:
        with self._lock:
            self._idle.append(connection)

    def _replace_late(self, late: list[_Connection]) -> None:
        with self._lock:
            old, self._late = self._late, late
        for connection in old:
            connection.close()


def _close(connection: _Connection | None) -> None:
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.close()


def _left_s(until: float) -> float | None:
    """Return the seconds left, or None (no limit) if a socket can't wait that long.

    Raises:
        TimeoutError: no time is left.
    """
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the time is up")
    return None if left_s > _LONGEST_S else left_s
