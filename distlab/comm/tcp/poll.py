"""Wait for sockets to become readable or writable, from several threads at once.

We use Linux's epoll directly, because the standard library's wrapper takes three times
as long as the call itself, and use the wrapper everywhere else.
"""

from __future__ import annotations

import select
import selectors
import sys
from typing import Protocol

READ, WRITE = 1, 4
"""Events, with the numbers of EPOLLIN and EPOLLOUT."""


class Poller(Protocol):
    """A set of descriptors, which one thread may change while another waits."""

    def register(self, descriptor: int, events: int) -> None:
        """Add a descriptor."""

    def modify(self, descriptor: int, events: int) -> None:
        """Change what to wait for."""

    def unregister(self, descriptor: int) -> None:
        """Remove a descriptor."""

    def poll(self, timeout_s: float | None = None) -> list[tuple[int, int]]:
        """Wait, forever if None; return (descriptor, events) of all that are ready."""

    def close(self) -> None:
        """Close the poller."""


class Portable:
    """The standard library's best selector, as a `Poller`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def register(self, descriptor: int, events: int) -> None:
        """Implement `Poller.register`."""
        self._selector.register(descriptor, _to_selector(events))

    def modify(self, descriptor: int, events: int) -> None:
        """Implement `Poller.modify`."""
        self._selector.modify(descriptor, _to_selector(events))

    def unregister(self, descriptor: int) -> None:
        """Implement `Poller.unregister`."""
        self._selector.unregister(descriptor)

    def poll(self, timeout_s: float | None = None) -> list[tuple[int, int]]:
        """Implement `Poller.poll`."""
        return [
            (key.fd, (READ if mask & 1 else 0) | (WRITE if mask & 2 else 0))
            for key, mask in self._selector.select(timeout_s)
        ]

    def close(self) -> None:
        """Implement `Poller.close`."""
        self._selector.close()


def poller() -> Poller:
    """Return the fastest poller that this system has."""
    if sys.platform == "linux":
        return select.epoll()
    return Portable()


def _to_selector(events: int) -> int:
    return (selectors.EVENT_READ if events & READ else 0) | (
        selectors.EVENT_WRITE if events & WRITE else 0
    )
