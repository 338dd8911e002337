"""A clock, a shared store and calls between ranks, for services beside a Comm.

A service, such as a parameter server, a rendezvous or a failure detector, keeps its
logic in a plain function or object, `handle(peer, message) -> reply | None`, that does
no input or output of its own (see `services`). The same service therefore runs on real
processes and in virtual time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol


class Clock(Protocol):
    """Time, real or virtual."""

    def now_s(self) -> float:
        """Return seconds on a clock that never goes backwards."""

    def sleep(self, seconds: float) -> None:
        """Let this many seconds pass; in virtual time, they count as computation."""


class RealClock:
    """The clock of this machine."""

    def now_s(self) -> float:
        """Implement `Clock.now_s`."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Implement `Clock.sleep`."""
        time.sleep(seconds)


class Store(Protocol):
    """A few keys and values that all ranks share.

    A node that isn't a rank keeps them, so they outlive every rank. A method that waits
    raises `PeerLost` (its peer is "store") after `timeout_s` seconds, or if that node
    died.
    """

    def set(self, key: str, value: bytes) -> None:
        """Store `value` under `key`, replacing any value that is there."""

    def get(self, key: str, *, timeout_s: float | None = None) -> bytes:
        """Wait until `key` has a value, and return it."""

    def wait(self, keys: Sequence[str], *, timeout_s: float | None = None) -> None:
        """Wait until every one of `keys` has a value."""

    def add(self, key: str, amount: int) -> int:
        """Add to the integer under `key`, which is 0 at first, and return the sum."""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store `desired` if the value is `expected`, where b"" means no value.

        Returns the value afterwards.
        """


class Endpoint(Protocol):
    """Calls from one rank to another, which can get lost or arrive twice."""

    def call(self, peer: int | str, message: bytes, timeout_s: float) -> bytes:
        """Let `peer`, a rank or a named service, handle `message`; return its reply.

        If the peer's handle returns None ("not yet"), we offer it the message again.

        Raises:
            PeerLost: the peer is dead, or no reply came within `timeout_s`. You can't
                know then if it handled the message.
        """

    def serve(self, handle: Callable[[int, bytes], bytes | None]) -> None:
        """Let `handle` answer calls to this rank from now on; return at once.

        It does so until this rank's program ends, even while that program waits or
        sleeps.
        """
