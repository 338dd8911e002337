"""Measure how much memory this process has used, without torch."""

from __future__ import annotations

import resource
import sys


def peak_resident_bytes() -> int:
    """Return the most memory that was resident so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kibibytes
