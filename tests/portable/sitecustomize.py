"""Make this Linux look to distlab like a system without what only Unix has.

Put this folder on PYTHONPATH, as `make test-portable` does, and every Python process
loads it at its start. Code of distlab, and of learners, then finds

    os, signal, socket, select   without the names below, as on Windows
    sys.platform                 "elsewhere"
    fcntl, resource, termios …   not there: ImportError
    /proc, /dev, /sys            not there: FileNotFoundError
    os.symlink                   refused, as Windows does it without a privilege
    os.fork                      refused, whoever calls it; processes are spawned
    text files                   an error if they're opened without an encoding

Python's own library and torch still see Linux, because they have their own code for
other systems, which can't run here. We tell them apart by the file that calls.
"""

from __future__ import annotations

import builtins
import multiprocessing
import os
import select
import signal
import socket
import subprocess  # noqa: F401 - binds what it needs of os before that is hidden
import sys
import sysconfig
import warnings
from types import FrameType, ModuleType
from typing import Any


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


HIDDEN: dict[ModuleType, frozenset[str]] = {
    os: _names(
        """fork forkpty killpg setsid setpgid getpgid getpgrp getsid getuid geteuid
        getgid uname sched_getaffinity sched_setaffinity sched_setscheduler nice
        getloadavg sysconf pread pwrite preadv mkfifo mknod chroot memfd_create
        posix_spawn wait wait3 wait4 waitid WIFEXITED WIFSIGNALED WIFSTOPPED
        WEXITSTATUS WTERMSIG WNOHANG O_NONBLOCK O_NOFOLLOW O_CLOEXEC O_DIRECTORY
        O_PATH O_SYNC getxattr setxattr register_at_fork openpty set_blocking
        statvfs fchmod fchown chown lchown fchdir ttyname tcgetpgrp"""
    ),
    signal: _names(
        """SIGKILL SIGSTOP SIGCONT SIGUSR1 SIGUSR2 SIGBUS SIGALRM SIGCHLD SIGHUP
        SIGQUIT SIGPIPE SIGTSTP SIGWINCH ITIMER_REAL setitimer alarm pause sigwait
        pthread_sigmask pthread_kill siginterrupt"""
    ),
    socket: _names("AF_UNIX AF_NETLINK send_fds recv_fds SO_REUSEPORT"),
    select: _names("poll epoll kqueue"),
}
UNIX_MODULES = _names(
    "fcntl resource termios tty pty pwd grp _posixsubprocess syslog crypt"
)
NOT_THERE = ("/proc", "/dev/shm", "/sys")

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
_OURS = tuple(os.path.join(_ROOT, name) + os.sep for name in ("distlab", "solutions"))
_LIBRARY = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
_getframe = sys._getframe
_import = builtins.__import__
_NAMES = frozenset[str]().union(*HIDDEN.values())


def _is_ours(frame: FrameType) -> bool:
    """Return True if distlab's code calls, or a learner's."""
    file = frame.f_code.co_filename
    return file.startswith(_OURS) or "template_" in file


def _asked_by_us() -> bool:
    """Look past Python's own library, where pathlib and the like call for others."""
    frame: FrameType | None = _getframe(2)
    while frame is not None and not _is_ours(frame):
        file = frame.f_code.co_filename
        if "site-packages" in file or not file.startswith((_LIBRARY, "<frozen", _FILE)):
            return False
        frame = frame.f_back
    return frame is not None


_FILE = __file__


class _Elsewhere(ModuleType):
    """A module that hides some of its names from our code."""

    def __getattribute__(self, name: str) -> Any:
        if name in _NAMES and _is_ours(_getframe(1)) and name in HIDDEN[self]:
            raise AttributeError(f"{self.__name__}.{name} is only on Unix")
        return super().__getattribute__(name)


class _ElsewhereSys(ModuleType):
    """`sys`, which says that this is no known system."""

    def __getattribute__(self, name: str) -> Any:
        if name == "platform" and _is_ours(_getframe(1)):
            return "elsewhere"
        return super().__getattribute__(name)


def _import_elsewhere(name: str, *args: Any, **named: Any) -> Any:
    if name in UNIX_MODULES and _is_ours(_getframe(1)):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return _import(name, *args, **named)


def _audit(event: str, values: tuple[Any, ...]) -> None:
    if event in ("os.fork", "os.forkpty"):
        raise OSError(f"{event}: this system can't fork")
    if event in ("open", "os.listdir", "os.scandir"):
        path = values[0]
        if isinstance(path, str | os.PathLike):
            text = os.fspath(path)
            if str(text).startswith(NOT_THERE) and _asked_by_us():
                raise FileNotFoundError(2, "No such file or directory", str(text))
    elif event == "os.symlink" and _asked_by_us():
        raise OSError("a required privilege is not held by the client")


def install() -> None:
    """From now on, this process and those it starts are elsewhere."""
    for module in HIDDEN:
        module.__class__ = _Elsewhere
    sys.__class__ = _ElsewhereSys
    builtins.__import__ = _import_elsewhere
    sys.addaudithook(_audit)
    multiprocessing.set_start_method("spawn", force=True)
    if hasattr(builtins, "EncodingWarning"):
        warnings.filterwarnings("ignore", category=EncodingWarning)
        warnings.filterwarnings(
            "error", category=EncodingWarning, module=r"(distlab|tests)\b.*"
        )


if os.environ.get("DISTLAB_ELSEWHERE"):
    install()
