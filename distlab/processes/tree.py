"""Owning a tree of processes: adopt orphans, find descendants, end them all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> bool:
    """Adopt orphaned descendants (Linux), so that they can be found and ended."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def stop_being_subreaper() -> bool:
    """Let orphaned descendants go to the system again."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def die_with_parent() -> bool:
    """Have the kernel kill this process when its parent ends (Linux)."""
    return _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def descendants(pid: int, *, dead_too: bool = False) -> list[int]:
    """The processes below `pid`, children before grandchildren.

    Only Linux tells us, so elsewhere we find none.

    A process whose main thread has ended counts as dead (a zombie) while its other
    threads still end, and only then does it hand its children on: so the way down to
    the living leads through the dead.
    """
    children: dict[int, list[int]] = {}
    dead: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        if not entry.name.isdigit():
            continue
        state, parent = _state_and_parent(entry)
        children.setdefault(parent, []).append(int(entry.name))
        if state in ("", "Z"):
            dead.add(int(entry.name))
    found: list[int] = []
    level = children.get(pid, [])
    while level:
        found += level
        level = [grand for child in level for grand in children.get(child, [])]
    return [one for one in found if dead_too or one not in dead]


def end_descendants(
    pid: int | None = None, *, spare: frozenset[int] = frozenset()
) -> int:
    """SIGKILL every descendant of this process (or of `pid`) until none is left.

    A process that forks while we look is caught in a later round; orphans come to us
    because we are their subreaper. Our own dead are collected, and until they are, we
    look again. Returns how many were ended.
    """
    ended: set[int] = set()
    ours = pid is None or pid == os.getpid()
    for _ in range(200):
        below = descendants(pid or os.getpid(), dead_too=ours)
        alive = [p for p in below if p not in spare]
        if not alive:
            break
        for victim in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(victim, signal.SIGKILL)
        ended.update(alive)
        if ours:
            reap(alive)
        else:
            time.sleep(0.01)
    return len(ended)


@contextlib.contextmanager
def leaving_none() -> Iterator[None]:
    """End on the way out what was started in the block, also after Ctrl-C or SIGTERM.

    For the main thread. SIGTERM ends the block with SystemExit(143).
    """
    become_subreaper()
    before = frozenset(descendants(os.getpid()))
    on_term = signal.signal(signal.SIGTERM, _exit_by)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second one
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    finally:
        end_descendants(spare=before)
        signal.signal(signal.SIGTERM, on_term)


def _exit_by(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # an impatient second one cuts nothing short
    sys.exit(128 + number)


def end_sessions(leaders: set[int]) -> None:
    """SIGKILL and collect every process in the sessions that `leaders` opened.

    For ranks whose zygote is gone: they have been handed on to us.
    """
    for _ in range(200):
        alive = [pid for pid in descendants(os.getpid()) if _session(pid) in leaders]
        for victim in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(victim, signal.SIGKILL)
        reap([*leaders, *alive])
        if not alive:
            break


def cpu_s(pid: int) -> float:
    """Seconds of processor time that process `pid` has used; 0 where unknown."""
    if not sys.platform.startswith("linux"):
        return 0.0
    try:
        return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3), on Linux
    except (OSError, OverflowError):
        return 0.0


def sleeps(pid: int) -> bool:
    """Whether every thread of `pid` waits for something; True where unknown."""
    threads = Path(f"/proc/{pid}/task")
    try:
        numbers = os.listdir(threads)
    except OSError:
        return True  # gone, or not Linux
    return all(_state_and_parent(threads / each)[0] in ("S", "") for each in numbers)


def is_stopped(pid: int) -> bool:
    """Whether `pid` was stopped by a signal, as SIGSTOP does; False where unknown."""
    return _state_and_parent(Path(f"/proc/{pid}"))[0] == "T"


def reap(pids: list[int]) -> None:
    """Collect those of `pids` that are dead children of this process."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            for _ in range(100):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    break
                time.sleep(0.001)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _state_and_parent(entry: Path) -> tuple[str, int]:
    try:
        stat = (entry / "stat").read_bytes()
    except OSError:
        return "", 0  # gone
    # "pid (name) state ppid …": the name may hold spaces and parentheses
    state, parent = stat[stat.rindex(b")") + 2 :].split()[:2]
    return state.decode(), int(parent)


def _prctl(option: int, argument: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(option, argument, 0, 0, 0) == 0)
