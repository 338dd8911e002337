"""Return a started collective's Work, or wait for its end."""

from __future__ import annotations

from typing import TypeVar

from distlab.comm._protocol import Work

W = TypeVar("W", bound=Work)


def later_or_now(work: W, async_op: bool, timeout_s: float | None = None) -> W | None:
    """Return `work` if the caller will wait for it, or else wait for it here."""
    if async_op:
        return work
    work.wait(timeout_s)
    return None
