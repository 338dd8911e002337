"""Connect every two ranks of a job: all listen, and higher ranks dial lower ones.

    rank 0  ◀── dials ── rank 1  ◀── dials ── rank 2      store: tcp/0 = 127.0.0.1|4711
       ▲────────────────── dials ────────────────┘               tcp/1 = 127.0.0.1|4712

A rank listens on a port that the system chose and writes its address into the store. It
then talks to all ranks that dial it and all that it dials at the same time, so a single
silent connection doesn't hold up the others. If the other side fails the handshake, or
is silent for `PATIENCE_S`, we turn it away, count it and log it, while the ranks keep
waiting for each other. Once all lines exist, nobody listens any more.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import time
from collections import Counter

from distlab.comm._seams import Store
from distlab.comm.tcp.handshake import (
    Identity,
    StrangerError,
    Talk,
    as_dialler,
    as_listener,
)

PATIENCE_S = 5.0  # for one who was let to the door, until he has proved himself
REDIAL_S = 0.05
MAX_AT_THE_DOOR = 128
MAX_LOGGED = 10
_log = logging.getLogger("distlab.comm")


class MeetingError(RuntimeError):
    """Raised if the ranks of a job couldn't all connect to each other."""


class _Talker:
    """A connection on which a handshake is in progress."""

    def __init__(
        self, connection: socket.socket, talk: Talk, until: float, dialled: int | None
    ) -> None:
        self.socket, self.talk, self.until = connection, talk, until
        self.dialled = dialled  # which rank; None if it came to us
        self.heard = bytearray()
        self.needs = 0
        self.peer: int | None = None  # once it is proved

    def start(self) -> None:
        """Send the first bytes, or find out how many to wait for."""
        self._say(next(self.talk))

    def hear(self) -> None:
        """Read what has arrived, but never more than the handshake needs.

        Raises:
            StrangerError: the other side doesn't belong to this job.
            EOFError: the other side closed the connection.
        """
        piece = self.socket.recv(self.needs - len(self.heard))
        if not piece:
            raise EOFError("it closed the connection")
        self.heard += piece
        while len(self.heard) >= self.needs and self.peer is None:
            words, self.heard = bytes(self.heard), bytearray()
            try:
                self._say(self.talk.send(words))
            except StopIteration as end:
                self.peer = end.value

    def _say(self, turn: tuple[bytes, int]) -> None:
        words, self.needs = turn
        if words:
            self.socket.sendall(words)  # few bytes into an empty socket: no wait


class MeshMeeting:
    """One rank's part in forming the mesh."""

    def __init__(
        self, store: Store, me: Identity, *, host: str, port: int, timeout_s: float
    ) -> None:
        self._store, self._me = store, me
        self._started = time.monotonic()
        self._until = self._started + timeout_s
        self._selector = selectors.DefaultSelector()
        self._talkers: list[_Talker] = []
        self._redial: dict[int, float] = {}  # rank: when to try again
        self._addresses: dict[int, tuple[str, int]] = {}
        self.lines: dict[int, socket.socket] = {}
        self.turned_away: Counter[str] = Counter()
        self._listener = _listen(host, port, me.world_size)

    def hold(self) -> dict[int, socket.socket]:
        """Block until there is a line to every other rank; return the lines by rank.

        Raises:
            MeetingError: a rank didn't arrive, or doesn't have the same secret.
        """
        try:
            self._publish()
            for peer in range(self._me.rank):
                self._addresses[peer] = self._look_up(peer)
                self._redial[peer] = 0.0
            while len(self.lines) < self._me.world_size - 1:
                self._round()
        except BaseException:
            for line in self.lines.values():
                line.close()
            raise
        finally:
            for talker in self._talkers:
                talker.socket.close()
            self._selector.close()
            self._listener.close()
        return self.lines

    def _publish(self) -> None:
        host, port = self._listener.getsockname()[:2]
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._store.set(f"tcp/{self._me.rank}", f"{host}|{port}".encode())

    def _look_up(self, peer: int) -> tuple[str, int]:
        key, left_s = f"tcp/{peer}", max(0.001, self._until - time.monotonic())
        try:
            address = self._store.get(key, timeout_s=left_s)
            host, _, port = address.decode().partition("|")
            return host, int(port)
        except (RuntimeError, OSError) as error:
            raise self._nobody_came([peer]) from error
        except ValueError as error:
            raise MeetingError(f"the store has no address under {key}") from error

    def _round(self) -> None:
        """Wait for the next event and handle it."""
        now = time.monotonic()
        if now >= self._until:
            here = {*self.lines, self._me.rank}
            raise self._nobody_came(sorted({*range(self._me.world_size)} - here))
        for talker in [t for t in self._talkers if t.until <= now]:
            self._turn_away(talker, f"it said nothing for {PATIENCE_S:g} s")
        for peer in [p for p, at in self._redial.items() if at <= now]:
            del self._redial[peer]
            self._dial(peer)
        times = [t.until for t in self._talkers] + [*self._redial.values(), self._until]
        for key, _ in self._selector.select(max(0.0, min(times) - time.monotonic())):
            if key.data is None:
                self._welcome()
            elif key.data in self._talkers:
                self._hear(key.data)

    def _welcome(self) -> None:
        """Accept new connections; if there are many, drop the one silent longest."""
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        guests = [t for t in self._talkers if t.dialled is None]
        if len(guests) >= MAX_AT_THE_DOOR:
            self._turn_away(guests[0], "there were too many at the door")
        until = time.monotonic() + PATIENCE_S
        self._begin(_Talker(connection, as_listener(self._me), until, None))

    def _dial(self, peer: int) -> None:
        host, port = self._addresses[peer]
        try:
            left_s = max(0.001, self._until - time.monotonic())
            connection = socket.create_connection((host, port), timeout=left_s)
        except OSError as error:
            raise MeetingError(
                f"rank {self._me.rank} cannot reach rank {peer} at {host}:{port}: "
                f"{error.strerror or error}"
            ) from error
        self._begin(_Talker(connection, as_dialler(self._me, peer), self._until, peer))

    def _begin(self, talker: _Talker) -> None:
        connection = talker.socket
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._talkers.append(talker)
        self._selector.register(connection, selectors.EVENT_READ, talker)
        try:
            talker.start()
        except OSError as error:
            self._ended(talker, error)

    def _hear(self, talker: _Talker) -> None:
        try:
            talker.hear()
        except StrangerError as error:
            if talker.dialled is not None:
                raise self._refused(talker.dialled, str(error)) from error
            self._turn_away(talker, str(error))
        except (EOFError, OSError) as error:
            self._ended(talker, error)
        else:
            if talker.peer is not None:
                self._join(talker, talker.peer)

    def _join(self, talker: _Talker, peer: int) -> None:
        if peer in self.lines:
            self._turn_away(talker, f"rank {peer} is here already")
            return
        self._forget(talker)
        self.lines[peer] = talker.socket

    def _ended(self, talker: _Talker, error: Exception) -> None:
        """Handle a closed connection; if we dialled a busy rank, dial it again."""
        if talker.dialled is None:
            self._turn_away(talker, "it closed the connection before it proved itself")
            return
        self._forget(talker)
        talker.socket.close()
        self._redial[talker.dialled] = time.monotonic() + REDIAL_S

    def _turn_away(self, talker: _Talker, reason: str) -> None:
        self._forget(talker)
        talker.socket.close()
        self.turned_away[reason] += 1
        if self.turned_away.total() <= MAX_LOGGED:
            _log.warning("rank %d turned a connection away: %s", self._me.rank, reason)

    def _forget(self, talker: _Talker) -> None:
        self._talkers.remove(talker)
        self._selector.unregister(talker.socket)

    def _refused(self, peer: int, reason: str) -> MeetingError:
        host, port = self._addresses[peer]
        return MeetingError(
            f"rank {self._me.rank} cannot join rank {peer} at {host}:{port}: {reason}"
        )

    def _nobody_came(self, missing: list[int]) -> MeetingError:
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {missing}"
        waited_s = time.monotonic() - self._started
        reasons = "; ".join(f"{n} × {why}" for why, n in self.turned_away.items())
        away = f" (turned away: {reasons})" if reasons else ""
        return MeetingError(
            f"rank {self._me.rank} waited {waited_s:.1f} s for {who}, "
            f"which did not come{away}"
        )


def _listen(host: str, port: int, world_size: int) -> socket.socket:
    if host in ("", "0.0.0.0", "::"):
        raise ValueError(
            f"host is {host!r}, which is every address of this machine: name the one "
            "by which the other ranks reach it"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"host {host!r} is no address: {error.strerror}") from error
    try:
        listener.bind(address)
        listener.listen(max(MAX_AT_THE_DOOR, world_size))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            why = "is in use; with port 0 the system chooses a free one"
        else:
            why = f"cannot be listened on: {error.strerror}"
        raise ValueError(f"port {port} of {host} {why}") from error
    return listener
