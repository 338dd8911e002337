"""What the kernel keeps from a process. It cannot be taken back: each in a new one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distlab.grading import landlock

TRY = """
import ctypes, os, subprocess, sys
from distlab.grading import landlock
secrets = sys.argv[1:]
assert landlock.hold(secrets)
libc = ctypes.CDLL(None, use_errno=True)
"""


@pytest.fixture
def course(tmp_path: Path) -> Path:
    for name in ("solutions/a.py", "tests/mutants/b.toml", "tests/c.py", "d.py"):
        path = tmp_path / "course" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "course"


def said(course: Path, code: str) -> str:
    """What a process says that is held, in the course."""
    if landlock.version() < 2:
        pytest.skip("this kernel has no Landlock, or too old a one")
    secrets = [str(course / "solutions"), str(course / "tests" / "mutants")]
    done = subprocess.run(
        [sys.executable, "-c", TRY + code, *secrets, str(course / "absent")],
        cwd=course,
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", ["solutions/a.py", "tests/mutants/b.toml"])
def test_secrets_are_not_read_by_any_way(course: Path, name: str) -> None:
    ways = f"""
for way in (lambda: open({name!r}), lambda: os.open({name!r}, 0, dir_fd=folder)):
    try:
        folder = os.open(".", 0)
        way()
        print("read")
    except PermissionError:
        print("kept")
print(libc.open({name!r}.encode(), 0))
"""
    assert said(course, ways) == "kept\nkept\n-1\n"


def test_all_else_is_read_and_written(course: Path) -> None:
    ways = """
print(open("d.py").read(), open("tests/c.py").read(), *os.listdir("solutions"))
os.makedirs("tests/new/deep")
open("tests/new/e", "w").write("back")
"""
    assert said(course, ways).split() == ["d.py", "tests/c.py", "a.py"]
    assert (course / "tests" / "new" / "e").read_text() == "back"


def test_a_secret_is_not_moved_to_where_it_could_be_read(course: Path) -> None:
    ways = """
os.mkdir("new")
for way in (os.rename, os.link):
    try:
        way("solutions/a.py", "new/a.py")
        print(open("new/a.py").read())
    except OSError:
        print("kept")
"""
    assert said(course, ways) == "kept\nkept\n"


def test_no_program_is_started(course: Path) -> None:
    ways = """
try:
    subprocess.run(["true"])
except PermissionError:
    print("none")
"""
    assert said(course, ways) == "none\n"


def test_the_neighbours_of_the_secrets_are_what_is_allowed(course: Path) -> None:
    secrets = [str(course / "solutions"), str(course / "solutions" / "inside")]
    found = set(landlock._neighbours(secrets))
    assert {str(course / "tests"), str(course / "d.py")} <= found
    assert not any(str(course / "solutions") in path for path in found)
    assert str(course) not in found
