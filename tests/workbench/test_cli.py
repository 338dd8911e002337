"""The command line as a learner meets it: codes, sentences, nothing left behind."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from distlab.cli.check import check
from distlab.curriculum import load_curriculum
from distlab.runner import Cluster
from tests.workbench.course import (
    EXCHANGE,
    FIRST,
    FOREVER,
    RING_OF_SENDS,
    ROOT,
    SECOND,
    Course,
    Done,
    keep_warm,
)
from tests.workbench.golden import Golden
from tests.workbench.refusals import refusal

LAST = load_curriculum(ROOT).tasks[-1].number
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@pytest.fixture
def course(tmp_path: Path) -> Course:
    return Course(tmp_path)


@pytest.fixture
def here(course: Course, monkeypatch: pytest.MonkeyPatch) -> Course:
    """The course, with this process in it."""
    monkeypatch.chdir(course.root)
    monkeypatch.setenv("DISTLAB_STATE", str(course.state))
    return course


@pytest.fixture
def warm(here: Course, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Course:
    """The same, and ranks that are warm."""
    keep_warm(cluster, monkeypatch)
    return here


# ── check ───────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_from_the_first_check_to_the_second_task(course: Course) -> None:
    done = course.distlab("check")
    assert (done.code, done.err) == (10, "")
    assert re.fullmatch(r"1\.1 .*\n  phase1\S+collectives\.py:\d+\n", done.out)

    course.fill(FIRST, EXCHANGE)
    done = course.distlab("check", COLUMNS="60")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("1.1 PASS  n = 1, 2, 3, 4, 7")
    assert not CONTROL.search(done.out)  # it is piped
    assert "next: 1.2 " in done.out

    done = course.distlab("check")
    assert done.code == 10
    assert done.out.startswith("1.2 ")
    assert course.progress()[FIRST]["checks"] == 1
    core = [task for task in load_curriculum(ROOT).tasks if not task.stretch]
    assert f" 1 of {len(core)}\n" in course.distlab("status").out


def test_json_is_one_object_and_nothing_else(course: Course) -> None:
    course.fill(SECOND, RING_OF_SENDS)
    done = course.distlab("check", "1.1", "1.2", "--json", LC_ALL="C", PYTHONUTF8="0")
    assert (done.code, done.err) == (1, "")
    data = json.loads(done.out)
    assert {"code", "digest", "tasks", "exit"} <= set(data)
    assert (data["code"], data["exit"]) == ("mine", 1)
    first, second = data["tasks"]
    wanted = {"id", "number", "status", "seconds", "clauses"}
    assert wanted <= set(first)
    assert wanted <= set(second)
    assert (first["status"], second["status"]) == ("not_started", "fail")
    clause = second["clauses"][0]
    assert set(clause) == {"id", "status", "slug", "message", "world_size"}
    assert (clause["slug"], clause["world_size"]) == ("ring-of-sends", 3)
    assert "0→1→2→0" in clause["message"]


@pytest.mark.slow
def test_sixty_four_ranks_fit_on_the_screen(course: Course) -> None:
    course.fill(SECOND, RING_OF_SENDS)
    done = course.distlab("check", "1.2", "-n", "64")
    assert done.code == 1
    assert re.search(r"DEADLOCK +ranks 0→1→2→3→…→63→0\b", done.out)
    assert re.search(r"^ +… .*\b56\b", done.out, re.MULTILINE)  # ranks left out
    assert len(done.out.splitlines()) <= 20


@pytest.mark.slow
def test_two_checks_at_once(course: Course) -> None:
    course.fill(FIRST, EXCHANGE)
    both = [course.popen("-m", "distlab", "check", "1.1") for _ in range(2)]
    outs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outs
    assert all("1.1 PASS" in out and not err for out, err in outs)
    course.expect_nothing_left()
    assert course.progress()[FIRST]["checks"] == 2


def test_ranks_of_ones_own_choice_do_not_count(
    warm: Course, capsys: pytest.CaptureFixture[str]
) -> None:
    warm.fill(FIRST, "pass")  # right for one rank, and for one rank only
    assert check(["1.1"], worlds=[1]) == 0
    said = capsys.readouterr().out
    assert said.startswith("1.1 PASS  n = 1 ")
    assert re.search(r" check 1\.1$", said, re.MULTILINE)  # with all numbers
    warm.fill(FIRST, EXCHANGE)
    assert check(["1.1"], worlds=[5]) == 0
    assert "n = 5 " in capsys.readouterr().out
    assert warm.progress() == {}


def test_a_file_of_ones_choice(
    warm: Course, capsys: pytest.CaptureFixture[str]
) -> None:
    other = warm.root / "other.py"
    other.write_text(f"def send_recv(comm, tensor):{EXCHANGE}".replace("\n", "\n    "))
    assert check(["1.1"], code="other.py") == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert re.search(r"\bother\.py .*\b[0-9a-f]{12}$", head)
    assert warm.progress() == {}
    other.write_text("def send_recv(:")
    assert check(["1.1"], code="other.py") == 1
    assert "other.py:1" in capsys.readouterr().out.split()


def test_a_state_that_cannot_be_kept_changes_no_verdict(
    warm: Course, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warm.fill(FIRST, EXCHANGE)
    (warm.root / "file").touch()
    monkeypatch.setenv("DISTLAB_STATE", str(warm.root / "file" / "state"))
    assert check(["1.1"]) == 0
    out, err = capsys.readouterr()
    assert "1.1 PASS" in out
    assert re.fullmatch(rf"distlab: .*{warm.root / 'file' / 'state'}.*\n", err)


# ── usage ───────────────────────────────────────────────────────────────────────────


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"names": ["9.9"]}, rf"'9\.9'.*\b1\.1 … {LAST}\b"),
    ({"names": ["broadcas"]}, r"'broadcas'.*\b1\.3 .*\b1\.5 "),
    ({"names": [""]}, "''"),
    ({"names": [], "phase": 7}, r"\b7\b.*\b1\b"),
    ({"names": ["1.1"], "phase": 1}, r"\bphase\b.*\btasks\b"),
    ({"names": [], "worlds": [0]}, r"^0 .*\b1\b.*\b64$"),
    ({"names": [], "worlds": [2, 65]}, r"^65 .*\b1\b.*\b64$"),
    ({"names": [], "code": "gone.py"}, r"--code\b.*'gone\.py'"),
    ({"names": [], "code": "solutions"}, r"--code\b.*'solutions'"),
    ({"names": [], "code": ""}, r"--code\b.*''"),
]


def test_what_cannot_be_asked_of_check(here: Course, golden: Golden) -> None:
    told = []
    for arguments, named in REFUSED:
        said = refusal(ValueError, check, **arguments)
        assert re.search(named, said), (arguments, said)
        told.append(said)
    golden("cli/check-refused", "\n".join(told))


def test_usage_errors_are_2_and_one_sentence(course: Course) -> None:
    for arguments in (
        ["check", "9.9"],
        ["reset", "nothing"],
        ["hint", "1.1", "--level", "5"],
        ["watch", "9.9"],
        ["demo", "-n", "65"],
    ):
        done = course.distlab(*arguments)
        assert (done.code, done.out) == (2, ""), arguments
        assert re.fullmatch(r"distlab: .+\n", done.err), done.err


def test_help_names_the_verbs(course: Course) -> None:
    bare, asked = course.distlab(), course.distlab("--help")
    assert (bare.code, asked.code) == (2, 0)
    for verb in ("start", "watch", "check", "hint", "trace", "status"):
        assert f"  distlab {verb} " in bare.out, verb
    shown = "start watch check hint trace status demo ddp explain quiz hunt use diff"
    for verb in (*shown.split(), "update", "reset", "doctor"):
        assert re.search(rf"│ {verb} ", asked.said), verb
    done = course.distlab("chekc")
    assert done.code == 2
    assert "chekc" in done.err


def test_outside_of_a_checkout(course: Course, tmp_path: Path) -> None:
    away = tmp_path / "away"
    shutil.copytree(
        ROOT / "distlab", away / "distlab", ignore=lambda *_: ["__pycache__"]
    )
    done = course.distlab("status", cwd=away, PYTHONPATH=str(away))
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(r"distlab: .+\n", done.err)
    inside = course.root / "phase1_data_parallel"
    assert course.distlab("status", cwd=inside).code == 0


def test_pipes_and_terminals(course: Course) -> None:
    done = course.shell(
        'set -o pipefail; $D explain | head -1; echo "$?"; $D status --help | true;'
        'LC_ALL=C PYTHONUTF8=0 $D status > ascii; echo "$?"; $D explain >&-; echo "$?"'
    )
    assert done.err == ""
    assert done.out.splitlines()[1:] in (["141", "0", "0"], ["0", "0", "0"])
    assert (course.root / "ascii").read_bytes().isascii()
    # A terminal has colors unless it is asked to have none.
    script = shutil.which("script")
    if script:
        command = f"{sys.executable} -m distlab status"
        colored = course.shell(f"TERM=xterm script -qec '{command}' /dev/null")
        assert "\x1b[" in colored.out
        plain = course.shell(f"TERM=xterm NO_COLOR=1 script -qec '{command}' /dev/null")
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", plain.out)


# ── Ctrl-C ──────────────────────────────────────────────────────────────────────────

DURING_AN_IMPORT = """
import os, signal, sys
from distlab.__main__ import main

class CtrlC:
    def find_spec(name, path, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC)
sys.argv = ["distlab", "check", "1.1"]
main()
"""


def stopped(done: Done) -> bool:
    """It ended by Ctrl-C, and said so in one line and nothing else."""
    return done.code == 130 and bool(re.fullmatch(r"\n.+\n", done.err))


@pytest.mark.slow
@pytest.mark.parametrize("module", ["typer", "distlab.cli.check", "torch"])
def test_ctrl_c_during_an_import(course: Course, module: str) -> None:
    course.fill(FIRST, FOREVER)
    done = course.python("-c", DURING_AN_IMPORT.format(module=module))
    assert stopped(done), done
    assert done.out == ""


def test_ctrl_c_while_ranks_spin(course: Course, golden: Golden) -> None:
    course.fill(FIRST, FOREVER)
    process = course.popen("-m", "distlab", "check", "1.1")
    while len(course.processes()) < 4:  # we, the zygote, two ranks
        time.sleep(0.05)
        assert process.poll() is None
    for _ in range(3):  # an impatient one
        process.send_signal(signal.SIGINT)
        time.sleep(0.01)
    done = course.ended(process)
    assert stopped(done), done
    assert done.out == ""
    golden("cli/stopped", done.err)


@pytest.mark.slow
def test_ctrl_c_on_the_way(course: Course) -> None:
    process = course.popen("-m", "distlab", "demo", PYTHONUNBUFFERED="1")
    assert process.stdout
    for line in process.stdout:
        if "rank " in line:
            break
    process.send_signal(signal.SIGINT)
    done = course.ended(process)
    assert stopped(done), done


# ── tests/test_phase1.py ────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_the_phase_front(course: Course) -> None:
    manifest = course.root / "curriculum.toml"
    text = manifest.read_text(encoding="utf-8")  # two tasks are enough here
    text = text[: text.rindex("[[phase.unit.task]]", 0, text.index('"1.3"'))]
    text = text[text.index("[[phase]]") :]  # the routes name tasks that are gone
    manifest.write_text(text, encoding="utf-8")

    done = course.python("tests/test_phase1.py")
    assert (done.code, done.err) == (10, "")
    head, *rows = done.out.splitlines()
    assert re.search(r" phase1\S+collectives\.py .*\b[0-9a-f]{12}$", head)
    assert [row[:4] for row in rows if row.startswith("1.")] == ["1.1 ", "1.2 "]

    course.fill(FIRST, EXCHANGE)
    odd = course.template().read_text().replace('"""Copy', '"""\\d Copy')
    course.template().write_text(odd)  # a warning is nobody's business
    done = course.python("-m", "pytest", "-q", "tests/test_phase1.py")
    assert done.code == 1
    assert re.search(r" phase1\S+collectives\.py .*\b[0-9a-f]{12}$", done.out, re.M)
    assert re.search(r"\b1 failed\b.*\b1 passed\b", done.out)
    assert len(re.findall(r"^1\.2 ", done.out, re.M)) == 1

    course.template().write_text("def send_recv(:\n")
    done = course.python("test_phase1.py", cwd=course.root / "tests")
    assert done.code == 1
    assert len(re.findall(r"^ +\S+/template_collectives\.py:1$", done.out, re.M)) == 2
