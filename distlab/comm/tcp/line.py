"""A connection to one peer that sends and receives frames without ever waiting.

A line moves bytes between a socket and the memory of tensors. If data has to wait
because the socket is full, it stays in the outbox. The meaning of frames doesn't matter
to a line. A payload is read into, and sent from, a tensor's own memory. We copy only
bytes that arrive in the same read as a header, or that fit into the same packet, which
are `READ_AHEAD` bytes at most.
"""

from __future__ import annotations

import socket
from collections import deque
from itertools import islice
from typing import Any, Protocol

from distlab.comm.tcp.frames import HEADER, Frame, Kind, parse

READ_AHEAD = 2048
_AT_ONCE = 8  # frames in one system call
_HEADER_BYTES = HEADER.size


class Reader(Protocol):
    """Interface of an object that learns what a line has received and sent."""

    def begin(self, line: Line, frame: Frame) -> memoryview | None:
        """Return where the payload of `frame` goes, if any; None means nowhere."""

    def end(self, line: Line) -> None:
        """Handle the complete payload of the last frame."""

    def sent(self, owner: object) -> None:
        """Handle the departure of the frame that was put for `owner`."""


class Parcel:
    """A frame in the outbox: the unsent part, and the owner to tell once it's sent."""

    __slots__ = ("begun", "owner", "views")

    def __init__(self, views: list[Any], owner: object) -> None:
        self.views, self.owner = views, owner
        self.begun = False

    def skip(self, count: int) -> int:
        """Remove `count` sent bytes; return how many belong to the next, or -1."""
        self.begun = self.begun or count > 0
        while self.views and count >= len(self.views[0]):
            count -= len(self.views.pop(0))
        if not self.views:
            return count
        self.views[0] = memoryview(self.views[0])[count:]
        return -1


class Line:
    """A connected socket that never blocks; raises OSError or EOFError when it ends."""

    def __init__(self, connection: socket.socket, peer: int) -> None:
        connection.setblocking(False)
        self.socket, self.peer = connection, peer
        self.outbox: deque[Parcel] = deque()
        self._buffer = memoryview(bytearray(READ_AHEAD))
        self._start = self._end = 0  # of what was read ahead
        self._left = 0  # bytes of a payload still to come
        self._into: memoryview | None = None

    @property
    def is_inside_payload(self) -> bool:
        """Return True if a payload has started to arrive but isn't complete."""
        return self._left > 0

    # ── out ─────────────────────────────────────────────────────────────────────────

    def put(
        self, head: bytes, payload: memoryview | None = None, owner: object = None
    ) -> None:
        """Make the next `flush` send a frame and then report its `owner`."""
        views = [head, payload] if payload else [head]
        self.outbox.append(Parcel(views, owner))

    def flush(self, reader: Reader) -> None:
        """Send as much of the outbox as the socket takes."""
        outbox = self.outbox
        while outbox:
            try:
                count = self._send_some()
            except BlockingIOError:
                return
            while outbox and (count := outbox[0].skip(count)) >= 0:
                owner = outbox.popleft().owner
                if owner is not None:
                    reader.sent(owner)

    def _send_some(self) -> int:
        """Send the first frames at once; short ones are copied into one packet."""
        outbox = self.outbox
        views = outbox[0].views
        if len(outbox) > 1:
            views = [
                view for parcel in islice(outbox, _AT_ONCE) for view in parcel.views
            ]
        if len(views) == 1:
            return self.socket.send(views[0])
        if sum(map(len, views)) <= READ_AHEAD:
            return self.socket.send(b"".join(views))
        return self.socket.sendmsg(views)

    # ── in ──────────────────────────────────────────────────────────────────────────

    def read(self, reader: Reader) -> None:
        """Read what has arrived.

        Raises:
            EOFError: the peer has closed the line.
            FrameError: the data isn't a frame.
        """
        more = True
        while more:
            more = self._read_payload(reader) if self._left else self._read_ahead()
            self._take_frames(reader)

    def _read_ahead(self) -> bool:
        """Read headers and the data after them; return False if there is no more."""
        buffer = self._buffer
        if self._start:
            rest = self._end - self._start
            buffer[:rest] = bytes(buffer[self._start : self._end])
            self._start, self._end = 0, rest
        room = READ_AHEAD - self._end
        count = self._receive(buffer[self._end :])
        self._end += count
        return count == room

    def _take_frames(self, reader: Reader) -> None:
        while not self._left and self._end - self._start >= _HEADER_BYTES:
            frame = parse(self._buffer, self._start)
            self._start += _HEADER_BYTES
            self._into = reader.begin(self, frame)
            self._left = frame.length
            if self._left:
                self._take_payload(reader)
            elif frame.kind == Kind.DATA:
                reader.end(self)

    def _take_payload(self, reader: Reader) -> None:
        """Copy as much of the payload as has arrived with its header."""
        count = min(self._left, self._end - self._start)
        if count and self._into is not None:
            self._into[:count] = self._buffer[self._start : self._start + count]
            self._into = self._into[count:]
        self._start += count
        self._left -= count
        if not self._left:
            self._into = None
            reader.end(self)

    def _read_payload(self, reader: Reader) -> bool:
        """Read into the tensor itself; return False if there is no more."""
        if self._into is None:  # nobody wants it
            wanted = min(self._left, READ_AHEAD)
            count = self._receive(self._buffer[:wanted])
        else:
            wanted = self._left
            count = self._receive(self._into[:wanted])
            self._into = self._into[count:]
        self._left -= count
        if not self._left:
            self._into = None
            reader.end(self)
        return count == wanted

    def _receive(self, into: memoryview) -> int:
        try:
            count = self.socket.recv_into(into)
        except BlockingIOError:
            return 0
        if not count:
            raise EOFError("the line was closed")
        return count
