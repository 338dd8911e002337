"""What the kernel keeps from a process, whatever the process calls: Landlock, on Linux.

An audit hook sees what Python does. C code (torch.from_file, ctypes), a folder that was
opened before and a program that was started go past it, and do not get past this.

Landlock knows only what is allowed, so everything is but the secrets: each neighbour of
each folder on the way to them. What is created later right beside those folders cannot
be read back by the process; it can be everywhere else.

Source: docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from functools import cache

from distlab.paths import parents_of

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # system calls, the same on every processor
_EXECUTE, _READ_FILE, _REFER = 1 << 0, 1 << 2, 1 << 13
_SCOPE_SIGNAL = 1 << 1
_PR_SET_NO_NEW_PRIVS = 38
_FIRST_WITH_REFER, _FIRST_WITH_SCOPES = 2, 6
_MOST_NEIGHBOURS = 5000  # a folder may hold very many: then the hook must do


def version() -> int:
    """Which Landlock this kernel has; 0 if none."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, _call(_CREATE, None, 0, 1))


def hold(secrets: Sequence[str]) -> bool:
    """From now on this thread reads no file below `secrets` and starts no program.

    Nor does what comes of it; and where scopes are known, it signals nobody else.
    Returns False, and does nothing, where that cannot be had.
    """
    known = version()
    try:
        neighbours = list(_neighbours(secrets)) if known >= _FIRST_WITH_REFER else []
    except OSError:  # a folder on the way that may not be listed
        return False
    if not 0 < len(neighbours) <= _MOST_NEIGHBOURS:
        return False
    rules = struct.pack("=Q", _EXECUTE | _READ_FILE | _REFER)
    if known >= _FIRST_WITH_SCOPES:
        rules += struct.pack("=QQ", 0, _SCOPE_SIGNAL)
    ruleset = _call(_CREATE, rules, len(rules), 0)
    if ruleset < 0:
        return False
    try:
        _allow(ruleset, os.sep, _REFER)  # to move files about, where one may at all
        for path in neighbours:
            _allow(ruleset, path, _READ_FILE)
        _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return _call(_RESTRICT, ruleset, 0) == 0
    finally:
        os.close(ruleset)


def _neighbours(secrets: Sequence[str]) -> Iterator[str]:
    """All that is no secret and leads to none, in as few paths as possible."""
    outer = {s for s in secrets if not any(p in secrets for p in parents_of(s))}
    way = {folder for secret in outer for folder in parents_of(secret)}
    for folder in way:
        if not os.path.isdir(folder):
            continue
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.path not in way and entry.path not in outer:
                    yield entry.path


def _allow(ruleset: int, path: str, access: int) -> None:
    with contextlib.suppress(OSError):  # it has just gone, or is a link
        beneath = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _call(_ADD, ruleset, 1, struct.pack("=Qi", access, beneath), 0)
        finally:
            os.close(beneath)


def _call(number: int, *arguments: int | bytes | None) -> int:
    return int(_libc().syscall(number, *arguments))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
