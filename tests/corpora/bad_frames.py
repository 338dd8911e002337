"""Frames that a service must refuse, thrown at a live server on real sockets.

    unproved    before, or instead of, a proof of the job's secret
    malformed   a true frame with bits turned, cut off, or bytes by chance
    oversized   a header that says more than the limit, by one who has proved himself
    replayed    a true frame once more, from this or another connection, or sent back

Each goes out on a connection of its own, for a bad frame ends it. Whether one was
accepted is asked of the service: it counts what reaches it.
"""

from __future__ import annotations

import random
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from distlab.comm.tcp.handshake import Identity, as_caller
from distlab.comm.tcp.sealed import (
    FROM_CALLER,
    FROM_SERVICE,
    HEAD_BYTES,
    HEADER,
    MAX_FRAME_BYTES,
    Kind,
    Opener,
    Sealed,
    Sealer,
)
from distlab.comm.tcp.server import NAME_BYTES, Server

KINDS = ("unproved", "malformed", "oversized", "replayed")
_WORLD_SIZE = 4
_NAME = "counter"
_ROUNDS = 50  # of the server, for one thing to happen; each is without a wait
_LENGTH_AT = HEADER.size - 4


@dataclass
class Outcome:
    """What became of the frames."""

    bad_frames: int = 0
    bad_frames_accepted: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    without_a_sentence: int = 0  # connections that were ended and no reason noted
    is_well: bool = False  # afterwards a true caller was answered


class _Wire:
    """A connection to the server, which runs only while we look at it."""

    def __init__(self, server: Server, address: tuple[str, int]) -> None:
        self._server = server
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.heard = bytearray()
        self.is_open = True

    def send(self, data: bytes) -> None:
        left = memoryview(data)
        for _ in range(len(data) + _ROUNDS):
            if not left or not self.is_open:
                return
            try:
                left = left[self.socket.send(left) :]
            except BlockingIOError:
                self.look()
            except OSError:
                self.is_open = False

    def look(self) -> None:
        self._server.step(0)
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.is_open = bool(data)
        self.heard += data

    def take(self, count: int) -> bytes:
        """The next bytes, fewer if the server ends the connection first."""
        for _ in range(_ROUNDS):
            if len(self.heard) >= count or not self.is_open:
                break
            self.look()
        taken = bytes(self.heard[:count])
        del self.heard[:count]
        return taken

    def until_ended(self) -> None:
        """Say no more, and see it end."""
        for _ in range(3):
            self.look()
        if self.is_open:  # it waits for the rest of something
            self.socket.shutdown(socket.SHUT_WR)
        for _ in range(_ROUNDS):
            if not self.is_open:
                break
            self.look()
        self.socket.close()
        self._server.step(0)


class Attack:
    """One server, its service that counts, and whoever throws things at it."""

    def __init__(self, seed: int = 0) -> None:
        self._chance = random.Random(seed)
        self._secret = secrets.token_bytes(32)
        self.num_handled = self._num_good = 0
        listener = socket.create_server(("127.0.0.1", 0), backlog=16)
        self._address = listener.getsockname()
        me = Identity(self._secret, -1, _WORLD_SIZE)
        self._server = Server(listener, me, _NAME, self._handle)
        self._recorded = b""

    def run(self, count: int) -> Outcome:
        """Throw `count` bad frames, of each kind as many."""
        throw: dict[str, Callable[[], None]] = {
            "unproved": self._unproved,
            "malformed": self._malformed,
            "oversized": self._oversized,
            "replayed": self._replayed,
        }
        outcome = Outcome()
        try:
            for number in range(count):
                kind = KINDS[number % len(KINDS)]
                before = self._server.turned_away.total()
                throw[kind]()
                outcome.by_kind[kind] += 1
                is_noted = self._server.turned_away.total() > before
                outcome.without_a_sentence += not is_noted
            outcome.bad_frames = count
            outcome.bad_frames_accepted = self.num_handled - self._num_good
            outcome.reasons = self._server.turned_away
            outcome.is_well = self._is_answered()
        finally:
            self._server.close()
        return outcome

    def _handle(self, peer: int, message: bytes) -> bytes:
        self.num_handled += 1
        return b"%d" % self.num_handled

    def _dial(self) -> _Wire:
        return _Wire(self._server, self._address)

    def _proved(self) -> tuple[_Wire, Sealer, Opener]:
        wire = self._dial()
        rank = self._chance.randrange(-1, _WORLD_SIZE)
        talk = as_caller(Identity(self._secret, rank, _WORLD_SIZE), _NAME)
        words, needs = next(talk)
        while True:
            try:
                words, needs = talk.send(wire.take(needs))
            except StopIteration as end:
                key = end.value.key
                break
            wire.send(words)
        sealer = Sealer(key, FROM_CALLER)
        wire.send(sealer.seal(Kind.HELLO, self._chance.randbytes(NAME_BYTES)))
        opener = Opener(key, FROM_SERVICE, MAX_FRAME_BYTES)
        hello = wire.take(HEAD_BYTES + NAME_BYTES)
        opener.feed(hello)
        return wire, sealer, opener

    def _call(self, sealer: Sealer) -> bytes:
        payload = self._chance.randbytes(self._chance.randrange(64))
        return sealer.seal(Kind.CALL, payload, number=1, oldest=1, patience_s=9.0)

    # ── what is thrown ──────────────────────────────────────────────────────────────

    def _unproved(self) -> None:
        wire, chance = self._dial(), self._chance
        greeting = wire.take(40)
        secret = secrets.token_bytes(32)
        talk = as_caller(Identity(secret, 1, _WORLD_SIZE), _NAME)
        next(talk)
        claim = talk.send(greeting)[0]
        sealer = Sealer(secret, FROM_CALLER)
        frames = sealer.seal(Kind.HELLO, bytes(NAME_BYTES)) + self._call(sealer)
        how = chance.randrange(4)
        if how == 0:  # frames at once
            wire.send(frames)
        elif how == 1:  # a proof by another secret
            wire.send(claim + frames)
        elif how == 2:
            wire.send(chance.randbytes(chance.randrange(1, 300)))
        else:  # the true claim, turned
            true = as_caller(Identity(self._secret, 1, _WORLD_SIZE), _NAME)
            next(true)
            wire.send(self._turned(true.send(greeting)[0]) + frames)
        wire.until_ended()

    def _malformed(self) -> None:
        wire, sealer, _ = self._proved()
        frame, chance = self._call(sealer), self._chance
        how = chance.randrange(4)
        if how == 0:
            frame = chance.randbytes(chance.randrange(HEAD_BYTES, 300))
        elif how == 1:
            frame = frame[: chance.randrange(1, len(frame))]
            frame += self._turned(frame)  # and then something else
            frame += chance.randbytes(2 * HEAD_BYTES)
        else:
            frame = self._turned(frame)
        wire.send(self._filled(frame))
        wire.until_ended()

    def _oversized(self) -> None:
        wire, sealer, _ = self._proved()
        length = self._chance.randrange(MAX_FRAME_BYTES + 1, 1 << 32)
        frame = bytearray(self._call(sealer))
        struct.pack_into("!I", frame, _LENGTH_AT, length)
        wire.send(bytes(frame))
        wire.until_ended()

    def _replayed(self) -> None:
        wire, sealer, opener = self._proved()
        how, frame = self._chance.randrange(3), b""
        if how == 0 and self._recorded:  # of another connection, in its place
            frame = self._recorded
        elif how == 1:  # what the service itself has sealed
            reflected = Sealer(secrets.token_bytes(32), FROM_SERVICE)
            frame = reflected.seal(Kind.HELLO, bytes(NAME_BYTES))
        else:
            true = self._call(sealer)
            wire.send(true)
            self._num_good += 1
            assert self._answer(wire, opener).kind == Kind.REPLY
            self._recorded = frame = true
        wire.send(frame)
        wire.until_ended()

    def _turned(self, data: bytes) -> bytes:
        """One to three bits of it turned."""
        turned = bytearray(data)
        for place in self._chance.sample(range(len(data)), min(3, len(data))):
            turned[place] ^= 1 << self._chance.randrange(8)
            if self._chance.random() < 0.5:
                break
        return bytes(turned)

    def _filled(self, frame: bytes) -> bytes:
        """As long as its header says, so that nothing is still waited for."""
        if len(frame) < HEAD_BYTES:
            return frame + self._chance.randbytes(HEAD_BYTES)
        (length,) = struct.unpack_from("!I", frame, _LENGTH_AT)
        lacks = HEAD_BYTES + length - len(frame)
        is_waited_for = lacks > 0 and length <= MAX_FRAME_BYTES
        return frame + bytes(lacks if is_waited_for else 0)

    def _answer(self, wire: _Wire, opener: Opener) -> Sealed:
        for _ in range(_ROUNDS):
            wire.look()
            data = wire.take(len(wire.heard))
            if frames := opener.feed(data):
                return frames[0]
        raise AssertionError("no answer came")

    def _is_answered(self) -> bool:
        wire, sealer, opener = self._proved()
        wire.send(self._call(sealer))
        answer = self._answer(wire, opener)
        wire.socket.close()
        return answer.kind == Kind.REPLY
