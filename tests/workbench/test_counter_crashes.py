"""The example service on both disks: every crash point, and a real folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from distlab.comm import Disk, RealDisk
from distlab.sim import CrashPoint, crash_points
from tests.workbench.counter_service import (
    AcknowledgesFirst,
    Counter,
    ForgetsTheFolder,
    TrustsTheTail,
)
from tests.workbench.disk_programs import Tell


def adds(kind: type[Counter], first: int, disk: Disk, tell: Tell) -> None:
    counter = kind(disk)
    for name in (first, first + 1):
        counter.handle(0, b"add %d %d" % (name, 16**name))
        tell(name)


def keeps_promises(kind: type[Counter], point: CrashPoint, before: set[int]) -> bool:
    """Whether all that was promised is there, once, after one more start."""
    told = before | set(point.told)
    digits = f"{kind(point.disk()).total():x}"[::-1]
    return set(digits) <= {"0", "1"} and all(
        digits[name : name + 1] == "1" for name in told
    )


def survives(kind: type[Counter]) -> bool:
    """Two lives, each of which may crash anywhere."""
    for first in crash_points(lambda disk, tell: adds(kind, 0, disk, tell)):
        if not keeps_promises(kind, first, set()):
            return False
        told = set(first.told)
        for second in crash_points(
            lambda disk, tell: adds(kind, 2, disk, tell), files=first.files
        ):
            if not keeps_promises(kind, second, told):
                return False
    return True


def test_the_right_counter_survives_two_crashes_anywhere() -> None:
    assert survives(Counter)


@pytest.mark.parametrize("kind", [AcknowledgesFirst, TrustsTheTail, ForgetsTheFolder])
def test_a_wrong_counter_does_not(kind: type[Counter]) -> None:
    assert not survives(kind)


def test_the_counter_on_a_real_folder(tmp_path: Path) -> None:
    first = Counter(RealDisk(tmp_path))
    for name in range(3):
        assert first.handle(0, b"add %d %d" % (name, 16**name)) == b"added"
    with (tmp_path / "log").open("ab") as log:
        log.write(b"deadbeef torn")
    again = Counter(RealDisk(tmp_path))
    assert again.handle(0, b"add 1 16") == b"added"
    assert again.handle(0, b"sum") == b"273"
    assert again.handle(0, b"wait 4") is None
    assert RealDisk(tmp_path).names() == ["log"]
