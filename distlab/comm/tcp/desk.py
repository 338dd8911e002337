"""Keep track of requests that a service has answered, or can't answer yet.

A caller that lost its connection sends the same request again under the same number. If
the service still lives and has answered that number, we don't ask it again but repeat
the answer. A restarted service knows nothing of this, so if something must count only
once even then, the service has to take care of it itself.

If a request waits, we tell the caller, so that it can report what it is waiting for. We
don't if the service has asked for a Tick, because it may answer without another
message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from distlab.comm.services import (
    Answer,
    Handle,
    PeerGone,
    Pending,
    Reacts,
    Request,
    Started,
    Tick,
    WakeAt,
)
from distlab.comm.tcp.frames import FrameError
from distlab.comm.tcp.handshake import NO_RANK
from distlab.comm.tcp.sealed import Kind, Sealed

MAX_CALLERS = 4096  # that are remembered though they have no connection now
MAX_KEPT = 256  # answers for one caller, until it says that it has them
MAX_KEPT_BYTES = 1 << 23  # of these, beside the last one
MAX_WAITING = 1024  # requests of one caller
MAX_LINES = 128  # connections of one caller


class Line(Protocol):
    """The part of a connection that an answer needs."""

    def answer(self, kind: Kind, number: int, payload: bytes) -> None:
        """Send an answer."""


class Caller:
    """A calling process, on any number of connections."""

    def __init__(self, rank: int, peer: int) -> None:
        self.rank, self.peer = rank, peer
        self.lines: set[Line] = set()
        self.waits: dict[int, Line] = {}  # which connection asked for a number last
        self.kept: dict[int, tuple[Kind, bytes]] = {}
        self.oldest = 0

    def give_up(self, oldest: int) -> None:
        """Forget answers that the caller has, or no longer wants."""
        self.oldest = max(self.oldest, oldest)
        for numbered in (self.waits, self.kept):
            for number in [n for n in numbered if n < self.oldest]:
                del numbered[number]

    def keep_less(self) -> None:
        """Forget the oldest answers if there are too many."""
        num_bytes = sum(len(payload) for _, payload in self.kept.values())
        while len(self.kept) > 1 and (
            len(self.kept) > MAX_KEPT or num_bytes > MAX_KEPT_BYTES
        ):
            num_bytes -= len(self.kept.pop(min(self.kept))[1])


class Desk:
    """Mediates between the connections and `handle`; belongs to one thread."""

    def __init__(
        self,
        handle: Handle,
        reacts: Reacts | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pending = Pending(handle)
        self._reacts, self._now_s = reacts, now_s
        self._callers: dict[bytes, Caller] = {}  # by the name it chose, oldest first
        self._by_peer: dict[int, Caller] = {}
        self._num_newcomers = 0
        self.wake_at_s: float | None = None
        self.num_handled = 0  # requests that were handed on

    def arrive(self, name: bytes, rank: int, line: Line) -> Caller:
        """Add a connection of the caller `name`; for a rank, only the latest counts.

        Raises:
            FrameError: another process has that name.
        """
        caller = self._callers.get(name)
        if caller is None:
            peer = rank
            if rank == NO_RANK:
                self._num_newcomers += 1
                peer = -self._num_newcomers
            elif rank in self._by_peer:
                self._forget(self._by_peer[rank])
            caller = self._by_peer[peer] = Caller(rank, peer)
        elif caller.rank != rank:
            raise FrameError(f"rank {rank} calls in the name of another")
        self._callers.pop(name, None)
        self._callers[name] = caller  # the latest stands last
        if len(caller.lines) >= MAX_LINES:
            raise FrameError(f"{MAX_LINES} connections are enough for one caller")
        caller.lines.add(line)
        self._drop_old()
        return caller

    def leave(self, caller: Caller, line: Line) -> None:
        """Remove a connection that has ended, and with the last one its caller."""
        caller.lines.discard(line)
        if not caller.lines and self._by_peer.get(caller.peer) is caller:
            self._pending.forget(caller.peer)
            self.event(PeerGone(caller.peer))

    def take(self, caller: Caller, line: Line, frame: Sealed) -> None:
        """Answer a request, now or later, and never the same number twice.

        Raises:
            FrameError: the request has an invalid number.
        """
        if self._by_peer.get(caller.peer) is not caller:
            raise FrameError("a newer process of the same rank calls here")
        if not 1 <= frame.oldest <= frame.number:
            raise FrameError(f"request {frame.number} is older than {frame.oldest}")
        if frame.number < caller.oldest:
            raise FrameError(f"request {frame.number} is one its caller has given up")
        caller.give_up(frame.oldest)
        self._pending.forget(caller.peer, before=frame.oldest)
        if len(caller.waits) >= MAX_WAITING:
            raise FrameError(f"{MAX_WAITING} requests at once are enough")
        caller.waits[frame.number] = line
        if frame.number in caller.kept:
            self._send(caller, frame.number)
            return
        now_s = self._now_s()
        self.num_handled += 1
        request = Request(
            peer=caller.peer,
            number=frame.number,
            message=frame.payload,
            until_s=now_s + frame.patience_s,
        )
        self._answer(self._pending.take(request, now_s))
        if frame.number in caller.waits and self.wake_at_s is None:
            line.answer(Kind.NOT_YET, frame.number, b"")

    def event(self, event: Started | PeerGone | Tick) -> None:
        """Tell a service that reacts about an event, and offer waiting requests again.

        Raises:
            TypeError: the service asks for an action that we don't know.
        """
        if self._reacts is None:
            return
        now_s = self._now_s()
        self._act(self._reacts.on(event, now_s))
        self._answer(self._pending.offer_again(now_s))

    def tick(self) -> None:
        """Send the service a Tick if it has asked for one and the time has come."""
        if self.wake_at_s is not None and self._now_s() >= self.wake_at_s:
            self.wake_at_s = None
            self.event(Tick())

    def _act(self, actions: Sequence[object]) -> None:
        for action in actions:
            if not isinstance(action, WakeAt):
                raise TypeError(f"a service cannot ask for {action!r}, only for WakeAt")
            self.wake_at_s = action.at_s

    def _answer(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            caller, number = self._by_peer[answer.request.peer], answer.request.number
            if answer.error is None:
                caller.kept[number] = (Kind.REPLY, answer.reply)
            else:
                text = f"{type(answer.error).__name__}: {answer.error}"
                caller.kept[number] = (Kind.FAILED, text.encode()[:4096])
            self._send(caller, number)
            caller.keep_less()

    def _send(self, caller: Caller, number: int) -> None:
        line = caller.waits.pop(number, None)
        if line in caller.lines and number in caller.kept:
            line.answer(caller.kept[number][0], number, caller.kept[number][1])

    def _forget(self, caller: Caller) -> None:
        """Drop a rank's earlier requests, because that rank was restarted."""
        self._pending.forget(caller.peer)
        if caller.lines:
            self.event(PeerGone(caller.peer))

    def _drop_old(self) -> None:
        for name, caller in list(self._callers.items()):
            if len(self._callers) <= MAX_CALLERS:
                return
            if not caller.lines:
                del self._callers[name]
                if self._by_peer.get(caller.peer) is caller:
                    del self._by_peer[caller.peer]
