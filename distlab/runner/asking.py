"""Calls to services that were not answered yet, as waits that the parent knows of.

Only such calls are told: a service has said "not yet", so nothing but another message
to it can change that. They stand beside the journal, which has the calls of the Comm.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from distlab.comm import Event
from distlab.comm._wrappers import call_site

ASKS, ANSWERED = "asks", "answered"


def told_by(
    tell: Callable[[Event], None],
) -> Callable[[int, str, float], Callable[[], None]]:
    """What an endpoint calls when a call of it waits; it returns what ends the wait."""

    def wait(number: int, service: str, timeout_s: float) -> Callable[[], None]:
        absent = ("dst", "src", "root", "shape", "dtype", "into_shape", "into_dtype")
        event: Event = {
            "k": ASKS,
            "n": number,
            "op": "call",
            "service": service,
            "group": "world",
            "members": [],
            "tag": 0,
            "bytes": 0,
            "ptr": 0,
            "reduce": None,
            **dict.fromkeys(absent),
            **call_site(sys._getframe(1)),
            "t": time.monotonic(),
            "timeout_s": timeout_s,
            "thread": threading.get_ident(),
            "threads": threading.active_count(),
        }
        tell(event)
        return lambda: tell({"k": ANSWERED, "n": number})

    return wait
