"""What code under judgement may not do to the machine it is judged on.

`install` holds this process, and what it forks, to a few rules by an audit hook, which
Python offers no way to take off again: the course's files are not changed, the
solutions are not read, no foreign process is ended, no program started, no socket
opened, no limit lifted, and forks are counted. Against mistakes and casual cheating.
Code that calls C walks around the hook. Where the kernel has Landlock, it keeps the
solutions and other programs from C code too: see tests/hostile/README.md for what is
not contained.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from distlab.grading import landlock
from distlab.paths import parents_of
from distlab.runner import RankContext
from distlab.runner.own_folder import shared_folder

MAX_FORKS = 32  # by one rank and everything it forked
MAX_SHARED_BYTES = 2 << 30  # RLIMIT_DATA does not count memory that is shared
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PROGRAMS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen")
_SOCKETS = ("socket.bind", "socket.connect", "socket.sendto", "socket.sendmsg")
_LIMITS = ("resource.setrlimit", "resource.prlimit")
# What changes a file: event → where its paths are, and the folders they count from.
_CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
    "os.truncate": ((0, None),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((0, 2), (1, 3)),
    "os.symlink": ((1, 2),),
    "shutil.rmtree": ((0, 1),),
    "shutil.move": ((0, None), (1, None)),
    "sqlite3.connect": ((0, None),),
}
_OF_THE_RUN = re.compile(
    r"(store|stack\d+|rank\d+|service\d+)(/|$)"
)  # in the folder of a run


class ForbiddenError(PermissionError):
    """The code under judgement tried what it may not.

    It is an OSError, so that libraries take it as they take a file system's refusal.
    """

    def __init__(self, message: str) -> None:
        super().__init__(errno.EPERM, message)

    def __str__(self) -> str:
        return str(self.strerror)


def install(
    course: Sequence[str],
    secrets: Sequence[str],
    doors: Collection[tuple[str, int]] = (),
) -> None:
    """From now on: no change below the folders `course`, no look below `secrets`.

    Both are what `resolved` gives: that takes a while, and is the same for all ranks.
    `doors` are where the run's own processes answer calls: the one thing to connect to,
    also again, once a connection has broken. The first call in a process counts:
    simulated ranks share one.
    """
    if _INSTALLED:
        return
    # Made before the hook is on, because the hook is called for imports too.
    guard = _Guard(course, secrets, doors)
    tempfile.tempdir = guard.own_folder  # beside the course it might not be read back
    _start_no_program()
    landlock.hold(secrets)
    sys.addaudithook(guard.hook)
    _INSTALLED.append(guard)


def resolved(course: Sequence[str], secrets: Sequence[str]) -> dict[str, list[str]]:
    """What `install` is given: real paths; the history of the course is secret too."""
    histories = [git for folder in course for git in _history(Path(folder))]
    return {
        "course": [*map(os.path.realpath, course)],
        "secrets": [*map(os.path.realpath, (*secrets, *map(str, histories)))],
    }


def doors_of(context: RankContext) -> Collection[tuple[str, int]]:
    """Where calls of this rank may go to."""
    doors: Collection[tuple[str, int]] = getattr(context.endpoint, "doors", ())
    return doors


def _history(folder: Path) -> list[Path]:
    """Where git keeps what the files of `folder` were, if it does: solutions too."""
    git = folder / ".git"
    try:
        if git.is_dir() or not git.is_file():
            return [git]
        # A worktree: the file says where its part is, and that says where the rest is.
        part = folder / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        return [git, part / (part / "commondir").read_text(encoding="utf-8").strip()]
    except (OSError, ValueError):
        return [git]


def _start_no_program() -> None:
    """Close the one door to other programs at which Python calls no hook."""
    try:
        import _posixsubprocess
    except ImportError:  # Windows, where Python calls the hook for every program
        return

    def fork_exec(arguments: Sequence[object], *_: object) -> int:
        raise ForbiddenError(f"a rank may not start another program: {arguments[0]!r}")

    setattr(_posixsubprocess, "fork_exec", fork_exec)  # noqa: B010 - to mypy it is fixed


_INSTALLED: list[object] = []


class _Guard:
    def __init__(
        self,
        course: Sequence[str],
        secrets: Sequence[str],
        doors: Collection[tuple[str, int]] = (),
    ) -> None:
        self._course, self._secrets = course, secrets
        self._doors = frozenset(doors)
        self._working_folder = os.path.realpath(os.getcwd())
        self._run = os.path.dirname(self.own_folder)
        self._above = {above for path in secrets for above in parents_of(path)}
        # A pipe of tokens: every fork takes one, whichever process it is made by.
        self._tokens, give = os.pipe()
        os.write(give, bytes(MAX_FORKS))
        os.close(give)
        self._rules: dict[str, Callable[[str, tuple[Any, ...]], None]] = {
            "open": self._open,
            "os.fork": self._fork,
            "os.forkpty": self._fork,
            "os.kill": self._kill,
            "os.killpg": self._kill_group,
            "mmap.__new__": _map,
            **dict.fromkeys(_CHANGES, self._change),
            **dict.fromkeys(_PROGRAMS, _program),
            **dict.fromkeys(_SOCKETS, self._talk),
            **dict.fromkeys(_LIMITS, _limit),
        }

    @property
    def own_folder(self) -> str:
        """Where a rank may do as it likes, wherever that folder was made.

        Asked each time: once its runs are over, a worker removes all that is its own.
        """
        return shared_folder() or self._working_folder

    def hook(self, event: str, values: tuple[Any, ...]) -> None:
        """Called by Python for every event, before it happens."""
        rule = self._rules.get(event)
        if rule is not None:
            rule(event, values)

    def _open(self, _event: str, values: tuple[Any, ...]) -> None:
        path, mode, flags = values
        if isinstance(path, int):
            return  # it was judged when it was opened
        writes = bool(set(mode or "") & set("wax+")) or bool((flags or 0) & _WRITING)
        if writes:
            self._refuse_change(path, None)
        else:
            at = _resolved(path, None)
            if at in self._above and os.path.isdir(at):
                # From an open folder one gets anywhere below it, unseen by us.
                raise ForbiddenError(f"{at}: a rank may not open this folder")
            if _inside(at, self._secrets):
                at = _inside(at, self._course) or at
                raise ForbiddenError(f"{at}: a rank may not read the solutions")

    def _change(self, event: str, values: tuple[Any, ...]) -> None:
        for place, base in _CHANGES[event]:
            self._refuse_change(values[place], None if base is None else values[base])

    def _refuse_change(self, path: Any, folder: int | None) -> None:
        at = None if isinstance(path, int) else _resolved(path, folder)
        if _inside(at, [self.own_folder]):
            return
        name = _inside(at, self._course)
        if name:
            raise ForbiddenError(f"{name}: a rank may not change the course's files")
        of_run = _inside(at, [self._run])
        if of_run == self._run or _OF_THE_RUN.match(of_run):
            raise ForbiddenError(f"{of_run}: a rank may not change the run's own files")

    def _fork(self, _event: str, _values: tuple[Any, ...]) -> None:
        try:
            token = os.read(self._tokens, 1)
        except OSError:  # it was closed
            token = b""
        if not token:
            raise ForbiddenError(f"{MAX_FORKS} forks are enough for one rank")

    def _kill(self, event: str, values: tuple[Any, ...]) -> None:
        pid = values[0]
        if pid < 0:
            self._kill_group(event, (-pid,))
        elif pid not in (0, os.getpid()) and _group_of(pid) != _own_group():
            raise ForbiddenError(f"a rank may not send a signal to process {pid}")

    def _kill_group(self, _event: str, values: tuple[Any, ...]) -> None:
        # Group 1, as kill(-1) has it, is every process there is.
        if values[0] not in (0, _own_group()):
            raise ForbiddenError("a rank may not send a signal to other processes")

    def _talk(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "socket.sendmsg" and values[1] is None:
            return  # to nobody new: comm's own lines between ranks send like this
        if event == "socket.connect" and values[1] in self._doors:
            return  # endpoint's: who proves nothing there is turned away
        raise ForbiddenError(f"ranks talk through comm, not through a socket ({event})")


def _map(_event: str, values: tuple[Any, ...]) -> None:
    if values[1] > MAX_SHARED_BYTES:
        gib = values[1] / (1 << 30)
        raise ForbiddenError(f"out of memory: a rank may not map {gib:.0f} GiB")


def _program(_event: str, values: tuple[Any, ...]) -> None:
    raise ForbiddenError(f"a rank may not start another program: {values[0]!r}")


def _limit(_event: str, _values: tuple[Any, ...]) -> None:
    raise ForbiddenError("a rank may not change its own limits")


def _own_group() -> int:
    return os.getpgrp() if hasattr(os, "getpgrp") else 0


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except (OSError, AttributeError):  # Windows has no groups of processes
        return -1


def _resolved(path: Any, folder: int | None) -> str | None:
    try:
        text = os.fsdecode(path)
        is_open = folder is not None and folder >= 0  # on Linux, and nowhere else
        if is_open and not os.path.isabs(text):
            text = f"/proc/self/fd/{folder}/{text}"
        return os.path.realpath(text)
    except (OSError, TypeError, ValueError):  # no folder to count from, or no path
        return None


def _inside(path: str | None, folders: Sequence[str]) -> str:
    """The path as seen from the first folder that it is, or is below of; or nothing."""
    for folder in folders:
        if path is not None and (path == folder or path.startswith(folder + os.sep)):
            return os.path.relpath(path, folder) if path != folder else path
    return ""
