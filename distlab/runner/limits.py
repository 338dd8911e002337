"""How much time and memory one run may take, and how a rank is held to it."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

MAX_RANKS = 64
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Caps on one run. A deadlock is found without them; they end all else."""

    seconds: float = 10.0  # wall clock from start to the last result
    idle_s: float = math.inf  # wall clock in which no rank calls or reports anything
    memory_bytes: int = 2 * GIB  # per rank, on top of what importing torch took
    output_bytes: int = 64 * 1024  # of printed text kept per rank
    journal_events: int = 200_000  # kept per rank; more is a loop that never ends


def cap_memory(extra_bytes: int) -> None:
    """Hold this process to `extra_bytes` of private memory beyond what it has now."""
    if not has_memory_limits():
        return
    import resource

    limit = _data_limit(extra_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def has_memory_limits() -> bool:
    """Return True where the system limits a process's private memory: on Linux."""
    return sys.platform.startswith("linux") and Path("/proc/self/status").exists()


def _data_limit(extra_bytes: int) -> int:
    import resource

    limit = _private_bytes() + extra_bytes
    _soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def cap_files() -> None:
    """Have this process write no file larger than 1 GiB: nobody's disk is endless."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return

    _soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = GIB if hard == resource.RLIM_INFINITY else min(GIB, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def _private_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0
