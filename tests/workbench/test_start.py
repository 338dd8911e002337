"""The five screens: each fits, each runs something, and nobody is trapped in them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from distlab.cli import prompt
from distlab.cli.start import Tour
from distlab.curriculum import Progress, find_root, load_curriculum

QUICK = """
import distlab.cli.doctor as doctor
import distlab.cli.start as subject
subject.EPOCHS = 2
if {without_doctor}:
    doctor.diagnose = lambda: []
raise SystemExit(subject.start())
"""


def run_start(
    state: Path, typed: str, *, without_doctor: bool = True
) -> tuple[int, str, str]:
    """Its exit code, what it printed, and what it complained about."""
    environment = {
        **os.environ,
        "DISTLAB_STATE": str(state),
        "PYTHONPATH": str(find_root()),
        "PYTHONIOENCODING": "utf-8",
    }
    done = subprocess.run(
        [sys.executable, "-c", QUICK.format(without_doctor=without_doctor)],
        input=typed,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def screens(said: str) -> dict[str, list[str]]:
    """The lines of each screen, by what it is called: "1/5" or "welcome back"."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in said.splitlines():
        if line.endswith("─"):
            name = re.split(r"  | ─", line)[0]
            lines = found[name] = []
        lines.append(line)
    return found


@pytest.mark.slow
def test_all_five_screens(tmp_path: Path) -> None:
    typed = "\nr\n\nx\nc\n\n7\n8\n\nq\n"
    code, said, complaints = run_start(tmp_path, typed, without_doctor=False)
    assert (code, complaints) == (0, "")
    shown = screens(said)
    assert list(shown) == ["1/5", "2/5", "3/5", "4/5", "5/5"]
    for lines in shown.values():
        assert len(lines) <= 24, "\n".join(lines)
    assert "python" in "\n".join(shown["1/5"])

    ranks = [line for line in shown["2/5"] if re.match(r" +rank \d ", line)]
    assert sorted(line.split()[1] for line in ranks) == ["0", "1", "2", "3"]
    assert len(re.findall(r"^ +rank 2 ", said, re.MULTILINE)) == 2  # r ran it again

    third = "\n".join(shown["3/5"])
    assert len(re.findall(r"\ba, b, c\b", third)) == 3  # x is no answer to it
    assert re.search(r"\b4 ranks\b", third)
    assert sum("REPLICAS DIFFER" in line for line in shown["4/5"]) == 1
    assert re.search(r"template_\w+\.py:\d+", said)

    # Only the answer that was one is kept.
    state = json.loads((tmp_path / "progress.json").read_text())
    assert state["predictions"] == {"start.time": "c"}


@pytest.mark.parametrize("typed", ["q\n", ""])
def test_quitting_at_once(tmp_path: Path, typed: str) -> None:
    code, said, complaints = run_start(tmp_path, typed)
    assert (code, complaints) == (0, "")
    assert list(screens(said)) == ["1/5"]


def test_a_state_that_cannot_be_kept_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("DISTLAB_STATE", str(file / "state"))
    monkeypatch.setattr("builtins.input", lambda question: "c")
    Tour(load_curriculum(), Progress(tmp_path)).predict("start.time", "abc")
    assert str(file / "state") in capsys.readouterr().out


def test_who_comes_back_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTLAB_STATE", str(tmp_path))
    progress = Progress(tmp_path)
    progress.record_verdict("collectives.exchange", passed=True, digest="")
    code, said, complaints = run_start(tmp_path, "\nq\n")
    assert (code, complaints) == (0, "")
    first, second = screens(said)
    assert (first != "1/5", second) == (True, "5/5")
    assert "1 of " in said
    assert "1.2" in said


def test_who_has_passed_everything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTLAB_STATE", str(tmp_path))
    for task in load_curriculum().tasks:
        Progress(tmp_path).record_verdict(task.id, passed=True, digest="")
    code, said, _ = run_start(tmp_path, "\n")
    assert code == 0
    assert len(screens(said)) == 1
    assert not {"1/5", "5/5"} & set(screens(said))


class FakeTerminal:
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("editor", "arguments"),
    [
        ("vim", ["vim", "+31", "a.py"]),
        ("code --wait", ["code", "--wait", "--goto", "a.py:31"]),
        ("'/opt/my editor/ed' -q", ["/opt/my editor/ed", "-q", "a.py"]),
        ("gedit", ["gedit", "a.py"]),
    ],
)
def test_the_editor_is_opened_at_the_line(
    monkeypatch: pytest.MonkeyPatch, editor: str, arguments: list[str]
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(sys, "stdin", FakeTerminal())
    monkeypatch.setattr("builtins.input", lambda question: "y")
    monkeypatch.setattr(
        subprocess, "run", lambda command, check: started.append(command)
    )
    monkeypatch.setenv("VISUAL", "")
    monkeypatch.setenv("EDITOR", editor)
    prompt.offer_editor("a.py", 31)
    assert started == [arguments]


def test_an_editor_that_is_missing_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", FakeTerminal())
    monkeypatch.setattr("builtins.input", lambda question: "y")
    monkeypatch.setenv("VISUAL", "no-such-editor-here")
    prompt.offer_editor("a.py", 31)
    assert "no-such-editor-here" in capsys.readouterr().out


def test_the_editor_is_not_opened_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISUAL", "vim")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("opened"))
    prompt.offer_editor("a.py", 31)  # no terminal: not even a question
    monkeypatch.setattr(sys, "stdin", FakeTerminal())
    for answer in ("", "n"):
        monkeypatch.setattr("builtins.input", lambda question, said=answer: said)
        prompt.offer_editor("a.py", 31)
