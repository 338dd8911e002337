"""What a crash can leave on a simulated disk, and whom that exposes."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from distlab.comm import Disk
from distlab.sim import CrashPoint, SimDisk, crash_points
from tests.workbench.disk_programs import NEW, OLD, WRONG, Tell, right
from tests.workbench.golden import Golden

Program = Callable[[Disk, Tell], None]


def is_whole(point: CrashPoint) -> bool:
    """The file is the old one or the new one; the new one, once that was promised."""
    return point.files.get("a") in ((NEW,) if point.told else (OLD, NEW))


def exposed(program: Program, **how: Any) -> CrashPoint | None:
    points = crash_points(program, files={"a": OLD}, **how)
    return next((point for point in points if not is_whole(point)), None)


def test_the_right_way_to_save_survives_every_crash() -> None:
    points = list(crash_points(right, files={"a": OLD}))
    assert all(is_whole(point) for point in points)
    assert {point.num_done for point in points} == {0, 1, 3, 4}  # a sync leaves less
    left = {(tuple(point.files.items()), point.told) for point in points}
    assert len(left) == len(points)


@pytest.mark.parametrize("program", WRONG, ids=lambda program: program.__name__)
def test_a_wrong_way_to_save_is_exposed(program: Program) -> None:
    assert exposed(program)
    assert exposed(program, limit=50, seed=1)  # also by a sample


def test_what_is_exposed_is_the_mistake_itself(golden: Golden) -> None:
    found = {program.__name__: exposed(program) for program in WRONG}
    renamed = found["renames_before_sync"]
    assert renamed
    assert (renamed.num_done, renamed.last) == (2, "rename('a.tmp', 'a')")
    assert renamed.files["a"] not in (OLD, NEW)
    forgotten = found["forgets_sync_folder"]
    assert forgotten
    assert (forgotten.files["a"], forgotten.told) == (OLD, ("saved",))
    gone = found["removes_first"]
    assert gone
    assert "a" not in gone.files
    assert (gone.num_done, gone.last, gone.files) == (3, "remove('a')", {})
    golden("disk/crash", f"{renamed}\n{gone}")


# ── one crash ───────────────────────────────────────────────────────────────────────


def left_by(disk: SimDisk, limit: int = 10_000) -> list[dict[str, bytes]]:
    return list(disk.crashes(limit, random.Random(0)))


def contents(disk: SimDisk) -> set[bytes | None]:
    return {files.get("log") for files in left_by(disk)}


def test_an_append_is_torn_at_any_byte() -> None:
    disk = SimDisk({"log": b"ab"})
    disk.append("log", b"xyz")
    torn = {b"ab", b"abx", b"abxy", b"abxyz"}
    assert contents(disk) == torn | {b"ab\0\0\0", b"abx\0\0", b"abxy\0"}
    disk.sync("log")
    assert contents(disk) == {b"abxyz"}


def test_a_second_append_needs_the_first() -> None:
    disk = SimDisk({"log": b""})
    disk.append("log", b"x")
    disk.append("log", b"y")
    assert contents(disk) == {b"", b"\0", b"x", b"x\0", b"xy"}


def test_writing_in_place_empties_first() -> None:
    disk = SimDisk({"log": b"old"})
    disk.write("log", b"n")
    assert contents(disk) == {b"old", b"", b"\0", b"n"}


def test_a_new_name_needs_the_folder() -> None:
    disk = SimDisk()
    disk.write("log", b"x")
    disk.sync("log")
    assert contents(disk) == {None, b"x"}
    disk.sync_folder()
    assert contents(disk) == {b"x"}


def test_a_rename_leaves_one_name_or_both() -> None:
    disk = SimDisk({"tmp": b"new", "log": b"old"})
    disk.rename("tmp", "log")
    assert left_by(disk) == [
        {"log": b"old", "tmp": b"new"},
        {"log": b"new", "tmp": b"new"},
        {"log": b"new"},
    ]


def test_a_removed_file_may_be_there_again() -> None:
    disk = SimDisk({"log": b"old"})
    disk.remove("log")
    disk.write("log", b"")
    disk.sync("log")
    assert contents(disk) == {b"old", b"", None}


def test_a_crash_draws_one_of_them() -> None:
    def before() -> SimDisk:
        disk = SimDisk({"log": b"ab"})
        disk.append("log", b"xyz")
        disk.write("other", b"12")
        return disk

    all_of_them = left_by(before())
    drawn = []
    for seed in range(300):
        disk = before()
        disk.crash(random.Random(seed))
        assert left_by(disk) == [disk.files]  # durable from now on
        drawn.append(disk.files)
    assert all(files in all_of_them for files in drawn)
    kept = {files["log"] for files in drawn}
    assert kept == {files["log"] for files in all_of_them}


def test_too_many_outcomes_are_drawn() -> None:
    disk = SimDisk()
    for name in ("a", "b", "c"):
        disk.write(name, b"x" * 1000)
    few = left_by(disk, 100)
    assert 50 < len(few) <= 100
    assert {} in few
    assert dict.fromkeys("abc", b"x" * 1000) in few
    assert few == left_by(disk, 100)


# ── the enumeration ─────────────────────────────────────────────────────────────────


def appends(disk: Disk, tell: Tell) -> None:
    for number in range(3):
        disk.append("log", b"%d" % number)
        disk.sync("log")
        tell(number)


def test_a_crash_comes_after_all_that_was_told() -> None:
    points = list(crash_points(appends, files={"log": b""}))
    assert max(len(point.told) for point in points) == 3
    assert all(a.num_done <= b.num_done for a, b in pairwise(points))
    for point in points:
        assert point.files["log"].startswith(b"012"[: len(point.told)])


def test_a_full_disk_ends_the_program() -> None:
    points = list(crash_points(appends, files={"log": b""}, capacity_bytes=2))
    assert max(len(point.told) for point in points) == 2
    assert {len(point.files["log"]) for point in points} == {0, 1, 2}


def test_a_program_that_recovers_can_crash_again() -> None:
    again = [
        second
        for first in crash_points(right, files={"a": OLD})
        for second in crash_points(right, files=first.files)
    ]
    assert all(point.files["a"] in (OLD, NEW) for point in again)


def test_a_program_must_do_the_same_each_time() -> None:
    names = iter("abcdef")

    def changes(disk: Disk, tell: Tell) -> None:
        disk.write(next(names), b"")
        disk.write("b", b"")

    with pytest.raises(RuntimeError, match=r"'b'.*'a'"):
        list(crash_points(changes))


def test_what_a_program_raises_comes_out() -> None:
    def divides(disk: Disk, tell: Tell) -> None:
        disk.write("a", b"")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(crash_points(divides))
