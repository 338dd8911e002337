"""`distlab watch` on a real terminal: a verdict at every save, whatever the editor."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distlab.cli import watch
from distlab.cli.watch import KEYS
from tests.workbench.course import (
    EXCHANGE,
    FIRST,
    FOREVER,
    PATIENCE_S,
    RING_OF_SENDS,
    SECOND,
    Course,
    filled,
    pristine,
)

NEXT = r"\n1\.2 .*\r\n +\S+/template_collectives\.py:\d+"  # it is not started
CHECKING = r"\b1\.1 …"
READY = KEYS.rpartition("   ")[2]  # the last of the keys: a verdict is out


class Terminal:
    """`distlab watch` behind a pseudo-terminal of 80 columns."""

    def __init__(self, course: Course, *arguments: str) -> None:
        self.keyboard, theirs = pty.openpty()
        termios.tcsetwinsize(self.keyboard, (24, 80))
        self._theirs = theirs
        self.before = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "distlab", "watch", *arguments],
            cwd=course.root,
            env=course.environment(TERM="xterm", NO_COLOR="1"),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        self.said = self._raw = ""
        self._seen = 0

    def until(self, words: str) -> str:
        """What is said from here to `words`, and these."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = re.search(words, self.said[self._seen :])
            if found:
                start, self._seen = self._seen, self._seen + found.end()
                return self.said[start : self._seen]
            assert time.monotonic() < deadline, self.said
            assert self.process.poll() is None or self._read(0), self.said
            self._read(0.5)

    def _read(self, patience_s: float) -> bool:
        ready, _, _ = select.select([self.keyboard], [], [], patience_s)
        if ready:
            self._raw += os.read(self.keyboard, 1 << 16).decode(errors="replace")
            self.said = re.sub(r"\x1b\[[0-9;]*m", "", self._raw)  # bold and dim
        return bool(ready)

    def press(self, keys: str) -> None:
        os.write(self.keyboard, keys.encode())

    def end(self) -> int:
        """Its exit code, once it has ended and left the terminal as it was."""
        code = self.process.wait(timeout=PATIENCE_S)
        while self._read(0.1):
            pass
        assert termios.tcgetattr(self._theirs) == self.before
        assert "Traceback" not in self.said, self.said
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.keyboard)
        os.close(self._theirs)


@pytest.fixture
def course(tmp_path: Path) -> Course:
    return Course(tmp_path)


@pytest.fixture
def terminal(course: Course) -> Iterator[Terminal]:
    watching = Terminal(course)
    yield watching
    watching.close()
    course.expect_nothing_left()


def test_saves_keys_and_the_next_task(course: Course, terminal: Terminal) -> None:
    assert re.match(
        r"1\.1 .*\r\n +\S+/template_collectives\.py:", terminal.until(READY)
    )
    assert "…" not in terminal.said  # nothing is checked

    # a save that is no Python, then one that is wrong, then a right one
    course.template().write_text("def send_recv(\n")
    said = terminal.until(READY)
    assert re.search(r"1\.1 NOT YET .*\bline 1\b", said)
    course.fill(FIRST, "comm.send(tensor, 1)")
    assert "[unmatched-send]" in terminal.until(READY)

    # gone, and back again
    course.template().unlink()
    assert "1.1 NOT YET" in terminal.until(READY)
    course.fill(FIRST, "return None")
    assert "[no-messages]" in terminal.until(READY)

    # as vim and many others save: beside, then renamed, with a backup
    beside = course.template().with_name("4913")
    beside.write_text(filled(FIRST, EXCHANGE))
    course.template().rename(course.template().with_suffix(".py~"))
    beside.rename(course.template())
    said = terminal.until("1.1 PASS(?s:.*)" + READY)
    assert re.search(r"1\.1 …( \d+ s)?\r\x1b\[K1\.1", terminal.said)
    assert "next: 1.2 " in said

    # the same task until n is pressed; two keys at once are two
    terminal.press("c")
    terminal.until("1.1 PASS(?s:.*)" + READY)
    terminal.press("nhhhhh")
    terminal.until(NEXT)
    for level in range(1, 5):
        terminal.until(rf"1\.2 {SECOND}\b.*\b{level} of 4\b(?s:.*?){READY}")
    last = terminal.until(READY)
    assert "hint 1.2 --level 4" in last
    assert "of 4" not in last
    # another file is saved: no verdict on 1.2; then one on what was begun there
    other = course.template("trainer")
    other.write_text(f"# mine\n{pristine('trainer')}")
    said = terminal.until(READY)
    assert other.name in said
    assert not re.search(NEXT, said)
    other.write_text(filled("trainer.broadcast_model", "return None", "trainer"))
    said = terminal.until("1.5 C1 (?s:.*)" + READY)
    assert not re.search(r"\b1\.2\b", said)
    other.write_text(pristine("trainer"))
    terminal.until(r"\n1\.5 (?s:.*)" + READY)
    terminal.press("xq")
    assert terminal.end() == 10
    assert course.progress()[FIRST]["passed"]


def test_a_save_while_we_answer_the_last_one_is_judged(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(course.root)
    monkeypatch.setenv("DISTLAB_STATE", str(course.state))
    cluster: Any = SimpleNamespace()
    session = watch._Session("", cluster, lambda: "", worlds=(), as_json=False)
    session.judge_if_wanted(asked=True)
    file, judged = course.template("trainer"), []
    begun = filled("trainer.broadcast_model", "return None", "trainer")
    with monkeypatch.context() as answering:
        answering.setattr(session, "_say_keys", lambda: file.write_text(begun))
        file.write_text(f"# mine\n{pristine('trainer')}")
        session.judge_if_wanted(asked=False)
    monkeypatch.setattr(session, "_verdict", lambda task: judged.append(task.id))
    monkeypatch.setattr(session, "_tell", lambda _: None)
    session.judge_if_wanted(asked=False)
    assert judged == ["trainer.broadcast_model"]


@pytest.mark.slow
def test_what_changed_the_timeline_and_going_on(
    course: Course, terminal: Terminal
) -> None:
    terminal.until(READY)
    terminal.press("t")
    assert "trace.html" not in terminal.until(READY)
    course.fill(FIRST, "comm.send(tensor, 1)")
    page = course.state / "last" / "trace.html"
    terminal.until(r"\.\./state/last/trace\.html(?s:.*)" + READY)
    assert re.search(rf"1\.1 {FIRST} C1: \d ", page.read_text())
    terminal.press("t")
    terminal.until(r"\.\./state/last/trace\.html(?s:.*?)" + READY)

    # the message arrives, and one more is sent
    back = "if comm.rank == 1:\n    comm.send(tensor, 0)\nelif comm.rank == 0:"
    course.fill(FIRST, f"{EXCHANGE}{back}\n    comm.recv(tensor, 1)")
    said = terminal.until("C2 NOT(?s:.*)" + READY)
    assert re.search(r"1\.1, C1 [^\r\n]*…(?s:.*)C2 NOT(?s:.*)\n  C1 .*, C2 ", said)

    # n, before it has passed: asked twice, and any other key takes it back
    terminal.press("n")
    said = terminal.until(READY)
    terminal.press("tn")
    for _ in range(2):
        said += terminal.until(READY)
    assert len(re.findall(r"\n +1\.1 .*\bn\b", said)) == 2
    assert not re.search(NEXT, said)
    terminal.press("n")
    terminal.until(NEXT)


@pytest.mark.slow
def test_what_passed_before_is_looked_at_again(course: Course) -> None:
    course.fill(FIRST, EXCHANGE)
    assert course.distlab("check", "1.1").code == 0
    terminal = Terminal(course)
    try:
        assert terminal.until(READY).startswith("1.2 ")
        # a typo counts against the current task, not against one that has passed
        text = course.template().read_text()
        course.template().write_text(f"{text}def (\n")
        terminal.until(r"1\.2 NOT YET(?s:.*)\[syntax-error\](?s:.*)" + READY)
        course.template().write_text(text)
        terminal.until(READY)

        # breaking 1.1 must not go unnoticed, though the current task is 1.2
        course.fill(FIRST, "comm.send(tensor, 1)")
        terminal.until(r"\[unmatched-send\](?s:.*)" + READY)
        assert course.progress()[FIRST]["fails_now"]
        course.fill(FIRST, EXCHANGE)
        terminal.until("1.1 PASS(?s:.*)" + READY)
        assert not course.progress()[FIRST]["fails_now"]

        # a file that is not the current one, and that is no Python any more
        course.template("trainer").write_text("def (\n")
        terminal.until(r"template_trainer\.py:1\b(?s:.*)" + READY)
        course.template("trainer").write_text(pristine("trainer"))
        terminal.until(READY)
        course.fill(FIRST, "comm.send(tensor, 1)")
        terminal.until(r"\[unmatched-send\](?s:.*)" + READY)
        terminal.press("q")
        assert terminal.end() == 1
    finally:
        terminal.close()
    assert "! 1.1" in course.distlab("status").out


@pytest.mark.slow
def test_a_newer_save_and_q_end_a_judgement_and_a_beginning_goes_on(
    course: Course, terminal: Terminal
) -> None:
    terminal.until(READY)
    course.fill(FIRST, FOREVER)
    terminal.until(CHECKING)
    course.fill(FIRST, EXCHANGE)
    terminal.until("1.1 PASS(?s:.*)" + READY)

    # a save that begins the next task goes on to that by itself
    both = filled(SECOND, RING_OF_SENDS).split("def ring_shift")
    first = course.template().read_text().split("def ring_shift")
    course.template().write_text(f"{first[0]}def ring_shift{both[1]}")
    terminal.until("1.2 C1 DEADLOCK(?s:.*)ring-of-sends(?s:.*)" + READY)
    course.fill(FIRST, FOREVER)
    terminal.until(CHECKING)
    terminal.press("q")
    terminal.end()
    assert "TIME" not in terminal.said


def test_ctrl_c_in_watch(course: Course, terminal: Terminal) -> None:
    terminal.until(READY)
    terminal.press("\x03\x03")
    # Without a controlling terminal, the keys are no signal: send what a shell would.
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 130
    assert re.search(r"\r\n\S.*\r\n$", terminal.said)


@pytest.mark.slow
def test_watch_one_task_with_ranks_of_ones_choice(course: Course) -> None:
    course.fill(SECOND, "comm.sendrecv(outgoing, 0, incoming, 0)")
    terminal = Terminal(course, "pass_around", "-n", "1")
    try:
        said = terminal.until(READY)
        assert "1.2 PASS  n = 1" in said
        assert "check 1.2" in " ".join(said.split())  # with all numbers
        course.template("trainer").write_text(f"# mine\n{pristine('trainer')}")
        said = terminal.until(READY)
        assert re.search(r"template_trainer\.py.*\b1\.2\b", said)
        assert "PASS" not in said
        terminal.press("q")
        assert terminal.end() == 0
    finally:
        terminal.close()
    assert course.progress() == {}
