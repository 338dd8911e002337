"""Sealed frames between a caller and a service, counted one by one.

    magic version kind zero sequence number oldest patience length │ seal │ payload
      4      1      1    2     8       8      8       8       4    │  16  │ length bytes

`sequence` counts the frames of one connection and direction from 0. `number` is the
caller's own number of a request, `oldest` is the lowest number for which it still
waits, and `patience` is how many seconds it will keep waiting. The seal is an
HMAC-SHA256 of the header and the payload, cut to 16 bytes and keyed for this connection
and direction. We therefore notice if a frame is lost, repeated, turned around, changed
in a single bit, or recorded on another connection, and end the connection with a
one-sentence message. If the fields of a header can't be right, we do so before we even
wait for its payload.

Source: sequence number and key per direction as in TLS 1.3 (RFC 8446, section 5.3).
"""

from __future__ import annotations

import hmac
import math
import struct
from enum import IntEnum
from typing import NamedTuple

from distlab.comm.tcp.frames import FrameError

MAGIC = b"dlsv"
VERSION = 1
HEADER = struct.Struct("!4sBBHQQQdI")
SEAL_BYTES = 16
HEAD_BYTES = HEADER.size + SEAL_BYTES
MAX_FRAME_BYTES = 1 << 20
"""Limit of a payload unless you ask for more; the field has room for 4 GiB."""


class Kind(IntEnum):
    """The purpose of a frame."""

    HELLO = 1  # the first of each direction: whose life this connection belongs to
    CALL = 2  # a request
    REPLY = 3  # its answer
    FAILED = 4  # the service raised an error; the payload says which
    REFUSED = 5  # the last: why the connection ends
    NOT_YET = 6  # before the answer: the request waits until something else comes


class Sealed(NamedTuple):
    """A frame that arrived with the right seal."""

    kind: int
    number: int
    oldest: int
    patience_s: float
    payload: bytes


FROM_CALLER = frozenset({Kind.HELLO, Kind.CALL})
FROM_SERVICE = frozenset(
    {Kind.HELLO, Kind.REPLY, Kind.FAILED, Kind.REFUSED, Kind.NOT_YET}
)


class Sealer:
    """Makes the frames of one direction of one connection."""

    def __init__(self, key: bytes, kinds: frozenset[Kind]) -> None:
        self._key = _key_of(key, kinds)
        self.sequence = 0

    def seal(
        self,
        kind: int,
        payload: bytes = b"",
        *,
        number: int = 0,
        oldest: int = 0,
        patience_s: float = 0.0,
    ) -> bytes:
        """Make the next frame."""
        head = HEADER.pack(
            MAGIC,
            VERSION,
            kind,
            0,
            self.sequence,
            number,
            oldest,
            patience_s,
            len(payload),
        )
        self.sequence += 1
        return head + _seal(self._key, head, payload) + payload


class Opener:
    """Extracts the frames of one direction of one connection from its bytes."""

    def __init__(self, key: bytes, kinds: frozenset[Kind], limit_bytes: int) -> None:
        self._key, self._kinds, self._limit = _key_of(key, kinds), kinds, limit_bytes
        self._sequence = 0
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Sealed]:
        """Return the frames that `data` completes.

        Raises:
            FrameError: the data isn't a frame of this connection, so we can't trust
                anything that comes after it.
        """
        self._buffer += data
        frames: list[Sealed] = []
        while len(self._buffer) >= HEAD_BYTES:
            frame = self._first()
            if frame is None:
                break
            frames.append(frame)
        return frames

    def _first(self) -> Sealed | None:
        head = bytes(self._buffer[: HEADER.size])
        kind, number, oldest, patience_s, length = self._believed(head)
        end = HEAD_BYTES + length
        if len(self._buffer) < end:
            return None
        seal = self._buffer[HEADER.size : HEAD_BYTES]
        payload = bytes(self._buffer[HEAD_BYTES:end])
        if not hmac.compare_digest(seal, _seal(self._key, head, payload)):
            raise FrameError("a frame has not the seal of this connection")
        del self._buffer[:end]
        self._sequence += 1
        return Sealed(kind, number, oldest, patience_s, payload)

    def _believed(self, head: bytes) -> tuple[int, int, int, float, int]:
        """Return a header's fields if they can be right, before checking the seal."""
        magic, version, kind, zero, sequence, *fields = HEADER.unpack(head)
        number, oldest, patience_s, length = fields
        if magic != MAGIC:
            raise FrameError(f"a frame begins with {magic!r}, not {MAGIC!r}")
        if version != VERSION:
            raise FrameError(f"a frame has version {version}; this is {VERSION}")
        if zero:
            raise FrameError("a frame has something where nothing may be")
        if kind not in self._kinds:
            raise FrameError(f"a frame is of kind {kind}, which does not belong here")
        if (kind == Kind.HELLO) != (self._sequence == 0):
            raise FrameError("a connection begins with HELLO, and has one only")
        if sequence != self._sequence:
            raise FrameError(
                f"a frame has sequence number {sequence}, not {self._sequence}: it is "
                "repeated, or one was lost"
            )
        if length > self._limit:
            raise FrameError(f"a frame has {length} bytes, more than {self._limit}")
        if math.isnan(patience_s) or patience_s < 0:
            raise FrameError(f"a frame has a patience of {patience_s} s")
        return kind, number, oldest, patience_s, length


def _key_of(key: bytes, kinds: frozenset[Kind]) -> bytes:
    """Return the key of one direction, so a frame can't be sent back to its sender."""
    return hmac.digest(key, b"caller" if kinds is FROM_CALLER else b"service", "sha256")


def _seal(key: bytes, head: bytes, payload: bytes) -> bytes:
    return hmac.digest(key, head + payload, "sha256")[:SEAL_BYTES]
