"""How much time and memory one run may take, and how a rank is held to it."""

from __future__ import annotations

import math
import resource
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
    if not Path("/proc/self/status").exists():
        return  # no private-memory limit to be had here (macOS)
    used = _private_bytes()
    _soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + extra_bytes
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def cap_files() -> None:
    """Have this process write no file larger than 1 GiB: nobody's disk is endless."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = GIB if hard == resource.RLIM_INFINITY else min(GIB, hard)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def _private_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0
