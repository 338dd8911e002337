"""Answer calls of any number of callers in one thread that never waits for one.

A stranger costs us no more than a connection, because we don't look at its messages.
The service receives only frames that have the right seal, in their order, on a
connection that passed its handshake (see `handshake` and `sealed`). If a caller fails
any of this, we turn it away with a one-sentence message and count it, and the other
callers notice nothing.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import time
from collections import Counter
from typing import Any, cast

from distlab.comm.services import Handle, Reacts, Started
from distlab.comm.tcp.desk import Caller, Desk
from distlab.comm.tcp.frames import FrameError
from distlab.comm.tcp.handshake import (
    Identity,
    KeyedTalk,
    Proved,
    StrangerError,
    as_service,
)
from distlab.comm.tcp.mesh import MAX_AT_THE_DOOR, MAX_LOGGED, PATIENCE_S
from distlab.comm.tcp.sealed import (
    FROM_CALLER,
    FROM_SERVICE,
    MAX_FRAME_BYTES,
    Kind,
    Opener,
    Sealed,
    Sealer,
)

NAME_BYTES = 16
"""Length of the name by which a caller, or a life of a service, introduces itself."""
MAX_GUESTS = 512  # connections at once: a process has descriptors for about 1,000
_READ_BYTES = 1 << 18
_LAST_READS = 32
_MOST_REASONS = 256
_log = logging.getLogger("distlab.comm")


class _Guest:
    """A connection, at first during its handshake, and then as a caller's."""

    def __init__(self, connection: socket.socket, talk: KeyedTalk) -> None:
        self.socket, self.talk = connection, talk
        self.until = time.monotonic() + PATIENCE_S
        self.heard, self.needs = bytearray(), 0
        self.outbox = bytearray()
        self.is_proved = False
        self.rank = 0
        self.caller: Caller | None = None
        self.sealer: Sealer
        self.opener: Opener

    def answer(self, kind: Kind, number: int, payload: bytes) -> None:
        """Put an answer into the outbox."""
        self.outbox += self.sealer.seal(kind, payload, number=number)

    def hear(self, data: bytes, limit_bytes: int, life: bytes) -> list[Sealed]:
        """Take in the data that came; after the handshake, return the frames in it.

        Raises:
            StrangerError: the other side doesn't belong to this job.
            FrameError: the data isn't a frame of this connection.
        """
        if self.is_proved:
            return self.opener.feed(data)
        self.heard += data
        while not self.is_proved and len(self.heard) >= self.needs:
            words = bytes(self.heard[: self.needs])
            del self.heard[: self.needs]
            try:
                self.say(self.talk.send(words))
            except StopIteration as end:
                self._begin(end.value, limit_bytes, life)
        if not self.is_proved:
            return []
        rest, self.heard = bytes(self.heard), bytearray()
        return self.opener.feed(rest)

    def say(self, turn: tuple[bytes, int]) -> None:
        """Put the next message of the handshake into the outbox."""
        words, self.needs = turn
        self.outbox += words

    def _begin(self, proved: Proved, limit_bytes: int, life: bytes) -> None:
        self.is_proved, self.rank = True, proved.peer
        self.sealer = Sealer(proved.key, FROM_SERVICE)
        self.opener = Opener(proved.key, FROM_CALLER, limit_bytes)
        self.outbox += self.sealer.seal(Kind.HELLO, life)


class Server:
    """Answers the calls that come to `listener` with a service's `handle`.

    `service` is a `Handle`, or an object with a `handle` and perhaps an `on`. Call
    `run` in a separate thread, or call `step` whenever `fileno()` is readable.
    """

    def __init__(
        self,
        listener: socket.socket,
        me: Identity,
        name: str,
        service: Any,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        handle = cast(Handle, getattr(service, "handle", service))
        reacts = service if isinstance(service, Reacts) else None
        self.desk = Desk(handle, reacts)
        self.turned_away: Counter[str] = Counter()
        """Connections that were ended by us, by the reason."""
        self._me, self._name, self._limit = me, name, max_frame_bytes
        self._life = secrets.token_bytes(NAME_BYTES)
        self._guests: dict[int, _Guest] = {}  # by descriptor, in order of arrival
        self._listener = listener
        self._is_over = self._has_started = False
        self._wake_read, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return a descriptor that is readable (epoll, kqueue) when there is work."""
        return int(self._selector.fileno())

    def run(self) -> None:
        """Serve until `stop`."""
        while not self._is_over:
            self.step(None)

    def stop(self) -> None:
        """Make `run` return, from any thread; connections stay open."""
        self._is_over = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def close(self) -> None:
        """Close all connections; no thread may still be in `run`."""
        for guest in list(self._guests.values()):
            guest.socket.close()
        self._guests.clear()
        self._selector.close()
        self._listener.close()
        self._wake_read.close()
        self._wake.close()

    def step(self, timeout_s: float | None) -> None:
        """Wait for the next events, at most this long, and handle them."""
        if not self._has_started:
            self._has_started = True
            self.desk.event(Started())
        for key, _ in self._selector.select(self._patience(timeout_s)):
            if self._is_over:
                return
            if key.fileobj is self._listener:
                self._welcome()
            elif key.fd in self._guests:
                self._hear(self._guests[key.fd])
        now = time.monotonic()
        for guest in self._at_the_door():
            if guest.until <= now:
                self._turn_away(guest, f"it said nothing for {PATIENCE_S:g} s")
        self.desk.tick()
        self._flush()

    def _patience(self, timeout_s: float | None) -> float | None:
        times = [guest.until for guest in self._at_the_door()]
        if self.desk.wake_at_s is not None:
            times.append(self.desk.wake_at_s)
        if not times:
            return timeout_s
        left_s = max(0.0, min(times) - time.monotonic())
        return left_s if timeout_s is None else min(left_s, timeout_s)

    def _at_the_door(self) -> list[_Guest]:
        return [guest for guest in self._guests.values() if guest.caller is None]

    def _welcome(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        if len(self._guests) >= MAX_GUESTS:
            self._note("there were too many connections")
            connection.close()
            return
        at_the_door = self._at_the_door()
        if len(at_the_door) >= MAX_AT_THE_DOOR:
            self._turn_away(at_the_door[0], "there were too many at the door")
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        guest = _Guest(connection, as_service(self._me, self._name))
        self._guests[connection.fileno()] = guest
        self._selector.register(connection, selectors.EVENT_READ)
        guest.say(next(guest.talk))

    def _hear(self, guest: _Guest) -> None:
        try:
            data = guest.socket.recv(_READ_BYTES)
            if not data:
                raise EOFError
            for frame in guest.hear(data, self._limit, self._life):
                self._take(guest, frame)
        except BlockingIOError:  # it has room again for what we have to say
            return
        except (StrangerError, FrameError) as error:
            self._turn_away(guest, str(error))
        except (OSError, EOFError):
            if guest.caller is None:
                reason = "it closed the connection before it proved itself"
                self._turn_away(guest, reason)
            else:
                self._end(guest)

    def _take(self, guest: _Guest, frame: Sealed) -> None:
        if frame.kind == Kind.HELLO:
            if len(frame.payload) != NAME_BYTES:
                raise FrameError("HELLO has no name")
            guest.caller = self.desk.arrive(frame.payload, guest.rank, guest)
        else:
            assert guest.caller is not None  # the opener lets nothing come before HELLO
            self.desk.take(guest.caller, guest, frame)

    def _flush(self) -> None:
        for guest in list(self._guests.values()):
            if not guest.outbox:
                continue
            try:
                del guest.outbox[: guest.socket.send(guest.outbox)]
            except BlockingIOError:
                pass
            except OSError:
                self._end(guest)
                continue
            events = selectors.EVENT_WRITE if guest.outbox else 0
            if len(guest.outbox) <= self._limit:  # or else it must first read
                events |= selectors.EVENT_READ
            if self._selector.get_key(guest.socket).events != events:
                self._selector.modify(guest.socket, events)

    def _note(self, reason: str) -> None:
        is_new = reason not in self.turned_away
        if is_new and len(self.turned_away) >= _MOST_REASONS:
            self.turned_away["for other reasons"] += 1
        else:
            self.turned_away[reason] += 1
        if self.turned_away.total() <= MAX_LOGGED:
            _log.warning("%s turned a connection away: %s", self._name, reason)

    def _turn_away(self, guest: _Guest, reason: str) -> None:
        self._note(reason)
        if guest.is_proved:
            guest.answer(Kind.REFUSED, 0, reason.encode())
        with contextlib.suppress(OSError):  # as much as it takes without a wait
            guest.socket.send(guest.outbox)
            # A close with bytes unread would take the sentence back from him.
            guest.socket.shutdown(socket.SHUT_WR)
            for _ in range(_LAST_READS):
                if not guest.socket.recv(_READ_BYTES):
                    break
        self._end(guest)

    def _end(self, guest: _Guest) -> None:
        if self._guests.pop(guest.socket.fileno(), None) is None:
            return
        self._selector.unregister(guest.socket)
        guest.socket.close()
        if guest.caller is not None:
            self.desk.leave(guest.caller, guest)
