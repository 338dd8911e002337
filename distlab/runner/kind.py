"""Which ranks this machine can have: real processes, or only simulated ones."""

from __future__ import annotations

import os
import sys
from typing import Literal

RanksKind = Literal["real", "simulated"]
VARIABLE = "DISTLAB_RANKS"


def ranks_kind() -> RanksKind:
    """Return which ranks this process uses: those that the environment asks for.

    Without DISTLAB_RANKS, they are real where that is possible.

    Raises:
        ValueError: the environment asks for ranks that don't exist.
    """
    asked = os.environ.get(VARIABLE, "")
    if asked == "real":
        return "real"
    if asked == "simulated":
        return "simulated"
    if asked:
        raise ValueError(f'{VARIABLE} is {asked!r}: set it to "real" or "simulated"')
    return "real" if can_be_real() else "simulated"


def can_be_real() -> bool:
    """Return True where we can fork ranks, watch them and end them: on Linux.

    We find and end what ranks have started by prctl and /proc, which only Linux has.
    """
    return sys.platform.startswith("linux") and hasattr(os, "fork")
