"""Enumerate all points where a program can crash, and all disks that this can leave.

    def save(disk, tell):                       # the program
        disk.write("a.tmp", b"new")
        disk.sync("a.tmp")
        disk.rename("a.tmp", "a")
        disk.sync_folder()
        tell("saved")

    for point in crash_points(save, files={"a": b"old"}):
        assert point.files["a"] == (b"new" if point.told else point.files["a"])

We run the program once for each of its operations, and end it there, so it must do the
same each time. A crash during an operation leaves nothing that a crash before or after
it couldn't leave, so these cases are complete.
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
"""Works on the disk, and tells others what it promises them, such as an
acknowledgement."""

LIMIT = 2000
_SHORT = 24  # characters of an operation's data that are shown


@dataclass(frozen=True, kw_only=True)
class CrashPoint:
    """A crash, and one of the disks that it can leave.

    `num_done` operations were completed, `last` is the last of them, and `told` is
    everything that the program had promised. The program can continue with `disk()`.
    """

    num_done: int
    last: str
    told: tuple[Any, ...]
    files: Files

    def disk(self) -> SimDisk:
        """Return the disk after the crash, on which everything is durable."""
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
    """Run `program` on a disk with `files`, crash it everywhere, and yield the disks.

    Each different disk comes once for each `told`. If a crash has more than `limit`
    outcomes, we draw that many of them, using `seed`. If a `DiskError` leaves the
    program because the disk is full, that ends it like a return.

    Raises:
        RuntimeError: the program did something different when it ran again.
        Exception: any error of the program itself.
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
    """Ends the program; don't catch it."""


class _Crashing(ObservedDisk):
    """A disk that crashes after `num_done` operations, when another one begins."""

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
