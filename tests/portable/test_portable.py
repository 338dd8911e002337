"""Learners' commands on a Linux that pretends to be no Unix: see sitecustomize.py.

Nobody has tried macOS or Windows yet. What these tests show is that the commands don't
use what only Unix has, and that a console that knows no Unicode can show their output.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.workbench.course import ROOT, Course, Done, filled

ELSEWHERE = {
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)]),
    "DISTLAB_ELSEWHERE": "1",
    "PYTHONIOENCODING": "cp1252",
    "PYTHONWARNDEFAULTENCODING": "1",
}
PASSED, FAILED, NOT_STARTED, NOT_JUDGED = 0, 1, 10, 12
RIGHT = """
if comm.rank == 0:
    comm.send(tensor, dst=1)
elif comm.rank == 1:
    comm.recv(tensor, src=0)
"""


@pytest.fixture
def course(tmp_path: Path) -> Course:
    return Course(tmp_path)


def distlab(course: Course, *arguments: str) -> Done:
    return course.distlab(*arguments, **ELSEWHERE)


def write(course: Course, text: str) -> None:
    path = course.root / "phase1_data_parallel" / "template_collectives.py"
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--help",), PASSED),
        (("start",), PASSED),
        (("status", "--all"), PASSED),
        (("hint", "1.1"), PASSED),
        (("explain", "unmatched-send"), PASSED),
        (("guide", "collectives"), PASSED),
        (("quiz",), PASSED),
        (("check", "1.1"), NOT_STARTED),
        (("check", "1.16", "--code", "reference"), NOT_JUDGED),
        (("check", "1.1", "2.1", "3.2", "4.7", "--code", "reference"), PASSED),
        (("sim", "ring_allreduce.all_reduce", "--code", "reference"), PASSED),
        (("doctor",), PASSED),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_a_command_works(course: Course, arguments: tuple[str, ...], code: int) -> None:
    done = distlab(course, *arguments)
    assert done.code == code, done.said


def test_own_tests_are_scored(course: Course) -> None:
    (course.root / "tests").mkdir(exist_ok=True)
    shutil.copytree(ROOT / "tests" / "mutants", course.root / "tests" / "mutants")
    command = ("score-test", "collectives")
    started = course.ended(course.popen("-m", "distlab", *command, **ELSEWHERE))
    assert started.code == NOT_STARTED  # it has written a file to begin with
    done = distlab(course, *command)
    assert done.code == FAILED, done.said  # what it wrote is only a beginning


def test_a_learners_way_to_a_pass(course: Course) -> None:
    write(course, filled("collectives.exchange", "comm.send(tensor, dst=1)"))
    done = distlab(course, "check", "1.1", "--json")
    (verdict,) = json.loads(done.out)["tasks"]
    assert (done.code, verdict["slug"]) == (FAILED, "unmatched-send")
    write(course, filled("collectives.exchange", RIGHT))
    assert distlab(course, "check", "1.1").code == PASSED
    assert course.progress()["collectives.exchange"]["passed"]


@pytest.mark.parametrize(
    ("task", "code"), [("1.1", FAILED), ("3.26", PASSED)], ids=["mine", "reference"]
)
def test_real_ranks_are_spawned(course: Course, task: str, code: int) -> None:
    """One task on a comm of real processes, and one on a torch process group."""
    write(course, filled("collectives.exchange", "comm.send(tensor, dst=1)"))
    side = "mine" if task == "1.1" else "reference"
    variables = {**ELSEWHERE, "DISTLAB_RANKS": "spawned"}
    done = course.distlab("check", task, "--json", "--code", side, **variables)
    assert done.code == code, done.said
    (verdict,) = json.loads(done.out)["tasks"]
    assert verdict["slug"] == ("unmatched-send" if task == "1.1" else "")


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])  # as Ctrl-C does
def test_watch_judges_what_is_there(course: Course, end: signal.Signals) -> None:
    write(course, filled("collectives.exchange", RIGHT))
    temporary = course.root.parent / "temporary"
    temporary.mkdir()
    variables = {**ELSEWHERE, "TMPDIR": str(temporary)}
    watching = course.popen("-m", "distlab", "watch", "1.1", "--json", **variables)
    assert watching.stdout is not None
    try:
        verdict = json.loads(watching.stdout.readline())
    finally:
        watching.send_signal(end)
        watching.communicate(timeout=60)
    course.expect_nothing_left()
    assert list(temporary.iterdir()) == []
    assert verdict["status"] == "pass"


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import os; os.fork()", "AttributeError"),
        ("import pty; pty.fork()", "ModuleNotFoundError"),
        (
            "from multiprocessing import get_context as c; c('fork').Process().start()",
            "OSError",
        ),
        ("import os; os.killpg(0, 0)", "AttributeError"),
        ("import signal; signal.SIGSTOP", "AttributeError"),
        ("import socket; socket.AF_UNIX", "AttributeError"),
        ("import fcntl", "ModuleNotFoundError"),
        ("open('/proc/self/stat', 'rb')", "FileNotFoundError"),
        ("import os; os.symlink('a', 'b')", "OSError"),
        ("print('\\u2500')", "UnicodeEncodeError"),
    ],
)
def test_what_only_unix_has_is_caught(course: Course, program: str, error: str) -> None:
    """A planted use of it: `template_` is how a learner's code is known."""
    code = f"exec(compile({program!r}, 'template_planted.py', 'exec'))"
    running = course.popen("-c", code, **ELSEWHERE)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 1
    assert said.strip().splitlines()[-1].startswith(error)
