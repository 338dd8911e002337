"""Measure how much memory this process has used, without torch."""

from __future__ import annotations

import sys


def peak_resident_bytes() -> int:
    """Return the most memory that was resident so far; 0 where nobody counts."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kibibytes
