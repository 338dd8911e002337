"""What services need beside a Comm: a clock, a shared store, calls between ranks.

A service (a parameter server, a rendezvous, a failure detector) keeps its logic in a
plain function or object, `handle(peer, message) -> reply | None`, that does no input or
output of its own: see `services`. It then runs on real processes and in virtual time
alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol


class Clock(Protocol):
    """Time, real or virtual."""

    def now_s(self) -> float:
        """Seconds on a clock that never goes back."""

    def sleep(self, seconds: float) -> None:
        """Let so many seconds pass; in virtual time this is how compute is charged."""


class RealClock:
    """The clock of this machine."""

    def now_s(self) -> float:
        """See `Clock.now_s`."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """See `Clock.sleep`."""
        time.sleep(seconds)


class Store(Protocol):
    """A few keys and values that all ranks share.

    A node that is no rank keeps them: they outlive every rank. Every wait raises
    `PeerLost` (its peer is "store") after `timeout_s` seconds, or if that node died.
    """

    def set(self, key: str, value: bytes) -> None:
        """Put `value` under `key`, whatever was there."""

    def get(self, key: str, *, timeout_s: float | None = None) -> bytes:
        """The value under `key`; waits until there is one."""

    def wait(self, keys: Sequence[str], *, timeout_s: float | None = None) -> None:
        """Wait until there is a value under every one of `keys`."""

    def add(self, key: str, amount: int) -> int:
        """Add to the whole number under `key` (0 at first); returns the sum."""

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Put `desired` there if `expected` is; b"" as `expected` stands for nothing.

        Returns what is there afterwards.
        """


class Endpoint(Protocol):
    """Calls from one rank to another; they can be lost and they can arrive twice."""

    def call(self, peer: int | str, message: bytes, timeout_s: float) -> bytes:
        """Have `peer` handle `message`, a rank or a service by its name; its reply.

        A peer whose handle gives None ("not yet") is offered the message again.

        Raises:
            PeerLost: the peer is dead, or no reply came within `timeout_s`. Whether
                the message was handled is then not known.
        """

    def serve(self, handle: Callable[[int, bytes], bytes | None]) -> None:
        """From now on `handle` answers the calls to this rank; returns at once.

        It does so until this rank's program ends, also while that waits or sleeps.
        """
