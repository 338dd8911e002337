"""Wrap torch.distributed's Work, and recognize its errors about a lost peer.

Source: torch.distributed.Work, and the messages of gloo's TCP transport.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from distlab.comm._protocol import PeerLost

_LOST_SIGNS = (
    "timed out",
    "timeout",
    "connection closed",
    "connection reset",
    "broken pipe",
    "abort",
)


class TorchWork:
    """A transfer in progress that turns torch's errors about a lost peer into ours."""

    def __init__(
        self,
        work: Any,
        rank: int,
        step: int,
        peer: int | None,
        timeout_s: float,
        finish: Callable[[], object] | None,
    ) -> None:
        self._work, self._rank, self._step, self._peer = work, rank, step, peer
        self._timeout_s, self.finish = timeout_s, finish
        self._is_done = False

    def wait(self, timeout_s: float | None = None) -> None:
        """Implement `Work.wait`."""
        if self._is_done:  # torch's gloo would wait for one more message
            return
        started = time.monotonic()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            # To torch, 0 ms means no limit at all.
            self._work.wait(timedelta(seconds=max(limit_s, 0.001)))
        except RuntimeError as error:
            if not says_peer_is_gone(str(error)):
                raise
            waited_s = time.monotonic() - started
            raise PeerLost(self._rank, self._step, self._peer, waited_s) from error
        self._is_done = True
        finish, self.finish = self.finish, None  # it may refer to this, forever
        if finish is not None:
            finish()

    def is_completed(self) -> bool:
        """Implement `Work.is_completed`."""
        return self._is_done or bool(self._work.is_completed())

    def source(self) -> int:
        """Return the rank that sent the message, for a receive from anyone."""
        return int(self._work._source_rank())


def says_peer_is_gone(message: str) -> bool:
    """Return True if an error of torch means a lost peer, not a mistake in the call."""
    return any(sign in message.lower() for sign in _LOST_SIGNS)
