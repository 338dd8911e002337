"""Building blocks of a service, on real processes as well as in virtual time.

A service (a store, a rendezvous, a parameter server) is a plain object. It answers
messages but does no input or output of its own, and uses the disk and the clock that it
is given.

    handle(peer, message) -> reply        answered now
    handle(peer, message) -> None         not yet: the message is offered again
    on(event, now_s) -> actions           optional: what happens beside messages

The side that carries messages to a service keeps a `Pending`. Real processes and the
simulation use the same class, so "offered again" means the same for both:

* We offer a message that got None again after every later message, and after every
  event, in the order of arrival, until it's answered. If a pass answers one, we make
  another pass.
* So `handle` sees such a message more than once. Whatever it notes before it
  returns None must survive being noted again (use a set of ranks, not a count).
* We drop it unanswered when its caller has given up (`until_s`) or is gone.
* Requests carry the caller's own number, counted by each caller from 1. If a request
  arrives again while one with the same number is waiting, it replaces that one. We
  don't drop other copies, so the service itself must count each request once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from distlab.comm._disk import Disk
from distlab.comm._seams import Clock

Handle = Callable[[int, bytes], bytes | None]
"""Answers one message of a peer at once, without waiting for anyone. The peer is a
rank. A caller without a rank (yet) has a negative number, which stays its own as long
as it is connected."""


class Service(Protocol):
    """Answers messages; it may also have a method `on`, see `Reacts`."""

    def handle(self, peer: int, message: bytes) -> bytes | None:
        """Implement `Handle`."""


@runtime_checkable
class Reacts(Protocol):
    """Decides on events; either a service that has a method `on`, or a launcher.

    Events and actions are plain values. A service receives `Started` (once, first),
    `PeerGone` and `Tick`, and can ask for a `WakeAt`. A launcher has its own events.
    """

    def on(self, event: object, now_s: float) -> Sequence[object]:
        """Decide what to do about `event`; `now_s` never goes backwards."""


@dataclass(frozen=True)
class Started:
    """The service has just been created, for the first time or again after a crash."""


@dataclass(frozen=True)
class PeerGone:
    """A caller's connection has closed, because its process has ended or died."""

    peer: int


@dataclass(frozen=True)
class Tick:
    """The time for which the service asked with `WakeAt` has come."""


@dataclass(frozen=True)
class WakeAt:
    """Ask for a `Tick` at this time on the clock of `now_s`, or soon if it has passed.

    A later one replaces it.
    """

    at_s: float


@dataclass(frozen=True, kw_only=True)
class ServiceContext:
    """The surroundings that a new service is given; it mustn't `clock.sleep`."""

    disk: Disk
    clock: Clock


Factory = Callable[[ServiceContext], Service]
"""Creates a service, and after a crash of its process another one on the same disk."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One message to a service, whose caller waits for the reply until `until_s`."""

    peer: int
    number: int  # the caller's own
    message: bytes
    until_s: float = math.inf  # on the service's clock


@dataclass(frozen=True)
class Answer:
    """The outcome of a request: a reply, or the error that `handle` raised."""

    request: Request
    reply: bytes
    error: Exception | None = None


class Pending:
    """The requests that a service couldn't answer yet."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._waiting: dict[tuple[int, int], Request] = {}  # in order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, request: Request, now_s: float) -> list[Answer]:
        """Offer a request that has just arrived; return everything answered now."""
        answer = self._offer(request)
        if answer is None:
            self._waiting[request.peer, request.number] = request
            return self.offer_again(now_s, besides=request)
        self._waiting.pop((request.peer, request.number), None)
        return [answer, *self.offer_again(now_s)]

    def offer_again(
        self, now_s: float, *, besides: Request | None = None
    ) -> list[Answer]:
        """Offer all waiting requests again, except `besides`, which we just offered."""
        answers: list[Answer] = []
        while True:
            found = self._pass(now_s, besides)
            if not found:
                return answers
            answers += found
            besides = None

    def forget(self, peer: int, before: float = math.inf) -> None:
        """Drop this caller's requests, or only those with a number below `before`.

        Use it when the caller has gone or has given up on them.
        """
        for key in [k for k in self._waiting if k[0] == peer and k[1] < before]:
            del self._waiting[key]

    def _pass(self, now_s: float, besides: Request | None) -> list[Answer]:
        answers = []
        for key, request in list(self._waiting.items()):
            if request.until_s < now_s:
                del self._waiting[key]
            elif request is not besides and (answer := self._offer(request)):
                del self._waiting[key]
                answers.append(answer)
        return answers

    def _offer(self, request: Request) -> Answer | None:
        try:
            reply = self._handle(request.peer, request.message)
            if reply is not None and not isinstance(reply, bytes):
                kind = type(reply).__name__
                raise TypeError(f"handle gave a {kind}: a reply is bytes, or None")
        except Exception as error:
            return Answer(request, b"", error)
        return None if reply is None else Answer(request, reply)
