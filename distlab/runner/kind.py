"""Which ranks this machine can have: real processes, or only simulated ones.

    real        processes that we fork from a warm one, on Linux
    spawned     processes that we spawn, where we can't fork, such as on macOS
    simulated   threads in virtual time, on any system

These are the values of DISTLAB_RANKS.
"""

from __future__ import annotations

import os
import sys
from typing import Literal, get_args

RanksKind = Literal["real", "spawned", "simulated"]
VARIABLE = "DISTLAB_RANKS"


def ranks_kind() -> RanksKind:
    """Return which ranks this process uses: those that the environment asks for.

    Without DISTLAB_RANKS, they are real where that is possible.

    Raises:
        ValueError: the environment asks for ranks that don't exist.
    """
    asked = os.environ.get(VARIABLE, "")
    for kind in get_args(RanksKind):
        if asked == kind:
            return kind  # type: ignore[no-any-return]
    if asked:
        kinds = ", ".join(get_args(RanksKind))
        raise ValueError(f"{VARIABLE} is {asked!r}: set it to one of {kinds}")
    return "real" if can_be_real() else "simulated"


def can_be_real() -> bool:
    """Return True where we can fork ranks, watch them and end them: on Linux.

    We find and end what ranks have started by prctl and /proc, which only Linux has.
    """
    return sys.platform.startswith("linux") and hasattr(os, "fork")
