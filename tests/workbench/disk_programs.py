"""Programs on a Disk: what both disks must do alike, and what a crash tells apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distlab.comm import Disk, DiskError

OLD, NEW = b"old", b"the new one"
Tell = Callable[[Any], None]
NOT_REFUSED = "not refused"
ELSEWHERE = ["../a", "/tmp/a", "sub/a", "..", ".", "", "a\0b", "a" * 256, "a\\b"]


def refusal(act: Callable[[], object]) -> str:
    """The sentence with which a disk refuses."""
    try:
        act()
    except DiskError as error:
        return str(error)
    return NOT_REFUSED


# ── alike on every disk: each returns plain data ────────────────────────────────────


def writes_and_reads(disk: Disk) -> Any:
    disk.write("a", b"one")
    disk.write("b", b"")
    disk.append("a", b", two")
    disk.append("c", b"made by append")
    return {name: disk.read(name) for name in disk.names()}


def writes_anew(disk: Disk) -> Any:
    disk.write("a", b"a long text")
    disk.write("a", b"short")
    return disk.read("a")


def every_byte(disk: Disk) -> Any:
    content = bytes(range(256)) * 300
    disk.write("a", content)
    disk.append("a", content)
    return disk.read("a") == 2 * content


def renames(disk: Disk) -> Any:
    disk.write("a.tmp", NEW)
    disk.write("a", OLD)
    disk.rename("a.tmp", "a")
    disk.write("b", b"b")
    disk.rename("b", "b")
    return disk.names(), disk.read("a"), disk.read("b")


def removes(disk: Disk) -> Any:
    disk.write("a", OLD)
    disk.remove("a")
    gone = disk.names()
    disk.append("a", NEW)
    return gone, disk.read("a")


def syncs(disk: Disk) -> Any:
    disk.write("a", b"1")
    disk.sync("a")
    disk.append("a", b"2")
    disk.sync("a")
    disk.sync_folder()
    disk.write("empty", b"")
    disk.sync("empty")
    return disk.read("a"), disk.read("empty")


def odd_names(disk: Disk) -> Any:
    names = ["with space", "ümlaut", "-dash", ".hidden", "a" * 255, "step-12.rank-0"]
    for name in names:
        disk.write(name, name.encode())
    return [disk.read(name) == name.encode() for name in disk.names()]


def asks_for_what_is_not_there(disk: Disk) -> Any:
    disk.write("there", b"")
    return [
        refusal(lambda: disk.read("none")),
        refusal(lambda: disk.sync("none")),
        refusal(lambda: disk.remove("none")),
        refusal(lambda: disk.rename("none", "there")),
        disk.names(),
    ]


def leads_elsewhere(disk: Disk) -> Any:
    disk.write("a", OLD)
    told = []
    for name in ELSEWHERE:
        told += [
            refusal(lambda n=name: disk.write(n, b"")),  # type: ignore[misc]
            refusal(lambda n=name: disk.append(n, b"")),  # type: ignore[misc]
            refusal(lambda n=name: disk.read(n)),  # type: ignore[misc]
            refusal(lambda n=name: disk.sync(n)),  # type: ignore[misc]
            refusal(lambda n=name: disk.remove(n)),  # type: ignore[misc]
            refusal(lambda n=name: disk.rename("a", n)),  # type: ignore[misc]
            refusal(lambda n=name: disk.rename(n, "a")),  # type: ignore[misc]
        ]
    return told, disk.names()


def no_bytes(disk: Disk) -> Any:
    told = []
    for act in (disk.write, disk.append):
        try:
            act("a", "text")  # type: ignore[arg-type]
        except TypeError as error:
            told.append(str(error))
    return told, disk.names()


ALIKE: list[Callable[[Disk], Any]] = [
    writes_and_reads, writes_anew, every_byte, renames, removes, syncs, odd_names,
    asks_for_what_is_not_there, leads_elsewhere, no_bytes,
]  # fmt: skip


# ── saving a file: one right way, and what is forgotten ─────────────────────────────


def right(disk: Disk, tell: Tell) -> None:
    disk.write("a.tmp", NEW)
    disk.sync("a.tmp")
    disk.rename("a.tmp", "a")
    disk.sync_folder()
    tell("saved")


def forgets_sync(disk: Disk, tell: Tell) -> None:
    disk.write("a.tmp", NEW)
    disk.rename("a.tmp", "a")
    disk.sync_folder()
    tell("saved")


def renames_before_sync(disk: Disk, tell: Tell) -> None:
    disk.write("a.tmp", NEW)
    disk.rename("a.tmp", "a")
    disk.sync("a")
    disk.sync_folder()
    tell("saved")


def forgets_sync_folder(disk: Disk, tell: Tell) -> None:
    disk.write("a.tmp", NEW)
    disk.sync("a.tmp")
    disk.rename("a.tmp", "a")
    tell("saved")


def writes_in_place(disk: Disk, tell: Tell) -> None:
    disk.write("a", NEW)
    disk.sync("a")
    disk.sync_folder()
    tell("saved")


def removes_first(disk: Disk, tell: Tell) -> None:
    disk.write("a.tmp", NEW)
    disk.sync("a.tmp")
    disk.remove("a")
    disk.rename("a.tmp", "a")
    disk.sync_folder()
    tell("saved")


def tells_too_early(disk: Disk, tell: Tell) -> None:
    tell("saved")
    right(disk, lambda what: None)


WRONG = [
    forgets_sync, renames_before_sync, forgets_sync_folder, writes_in_place,
    removes_first, tells_too_early,
]  # fmt: skip
