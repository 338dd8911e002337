"""Every place at which a program can crash, and every disk that this can leave.

    def save(disk, tell):                       # the program
        disk.write("a.tmp", b"new")
        disk.sync("a.tmp")
        disk.rename("a.tmp", "a")
        disk.sync_folder()
        tell("saved")

    for point in crash_points(save, files={"a": b"old"}):
        assert point.files["a"] == (b"new" if point.told else point.files["a"])

The program is run again for each of its operations, and ended there: it must do the
same each time. A crash during an operation leaves nothing that one before or after it
could not leave, so these are all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from distlab.comm import Disk, DiskError
from distlab.sim.disk import Files, SimDisk
from distlab.sim.observed_disk import ObservedDisk

Tell = Callable[[Any], None]
Program = Callable[[Disk, Tell], object]
"""Works on the disk, and tells what it promises to others: an acknowledgement."""

LIMIT = 2000
_SHORT = 24  # characters of an operation's data that are shown


@dataclass(frozen=True, kw_only=True)
class CrashPoint:
    """A crash and one of the disks that it can leave.

    `num_done` operations were done, `last` is the last one of them, and `told` is all
    that the program had promised. The program goes on with `disk()`.
    """

    num_done: int
    last: str
    told: tuple[Any, ...]
    files: Files

    def disk(self) -> SimDisk:
        """The disk after the crash, durable as it is."""
        return SimDisk(self.files)

    def __str__(self) -> str:
        when = "before the first operation"
        if self.last:
            when = f"after operation {self.num_done}, {self.last}"
        left = ", ".join(f"{name}: {_short(data)}" for name, data in self.files.items())
        return f"crash {when}; on the disk: {left or 'nothing'}"


def crash_points(
    program: Program,
    *,
    files: Mapping[str, bytes] | None = None,
    limit: int = LIMIT,
    seed: int = 0,
    capacity_bytes: int | None = None,
) -> Iterator[CrashPoint]:
    """Run `program` on a disk with `files`, crash it everywhere, and give what is left.

    Each different disk comes once for each `told`. Of one crash with more than `limit`
    outcomes as many are drawn from `seed`. A `DiskError` that leaves the program (the
    disk is full) ends it like a return.

    Raises:
        RuntimeError: the program did something else when it was run again.
        Exception: what the program itself raises.
    """
    before: list[str] = []
    seen: set[object] = set()
    while True:
        inner = SimDisk(files, capacity_bytes=capacity_bytes)
        disk, told = _Crashing(inner, len(before)), list[Any]()
        _run_to_crash(program, disk, told.append)
        done = disk.done
        if done[: len(before)] != before[: len(done)]:
            raise RuntimeError(
                f"the program must do the same each time it is run: {done[-1]} came "
                f"where there was {before[len(done) - 1]}"
            )
        for left in inner.crashes(limit, random.Random(f"{seed} {len(done)}")):
            key = (tuple(left.items()), repr(told))
            if key not in seen:
                seen.add(key)
                last = done[-1] if done else ""
                yield CrashPoint(
                    num_done=len(done), last=last, told=tuple(told), files=left
                )
        if not disk.is_down:
            return
        before = [*done, disk.next]


class _Crash(BaseException):
    """Ends the program; not to be caught."""


class _Crashing(ObservedDisk):
    """A disk that crashes when `num_done` operations are done and one more begins."""

    def __init__(self, disk: SimDisk, num_done: int) -> None:
        super().__init__(disk)
        self._num_done = num_done
        self.done: list[str] = []
        self.next = ""  # the operation that was not done
        self.is_down = False

    def _begin(self, name: str, *arguments: str | bytes) -> None:
        operation = f"{name}({', '.join(map(_short, arguments))})"
        if self.is_down or len(self.done) == self._num_done:
            self.next, self.is_down = self.next or operation, True
            raise _Crash
        self.done.append(operation)


def _run_to_crash(program: Program, disk: Disk, tell: Tell) -> None:
    with suppress(_Crash, DiskError):
        program(disk, tell)


def _short(value: object) -> str:
    text = repr(value)
    if len(text) <= _SHORT or not isinstance(value, bytes):
        return text
    return f"{text[:_SHORT]}… ({len(value)} bytes)"
