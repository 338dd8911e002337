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

import pytest

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

READY = "watching your files"


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
        self.said = ""
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
            self.said += os.read(self.keyboard, 1 << 16).decode(errors="replace")
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
    assert "1.1 not started" in terminal.until(READY)
    assert "checking" not in terminal.said

    # a save that is no Python, then one that is wrong, then a right one
    course.template().write_text("def send_recv(\n")
    said = terminal.until(READY)
    assert "1.1 NOT YET  line 1 is not Python" in said
    course.fill(FIRST, "comm.send(tensor, 1)")
    assert "[unmatched-send]" in terminal.until(READY)

    # gone, and back again
    course.template().unlink()
    assert "cannot be read" in terminal.until(READY)
    course.fill(FIRST, "return None")
    assert "[no-messages]" in terminal.until(READY)

    # as vim and many others save: beside, then renamed, with a backup
    beside = course.template().with_name("4913")
    beside.write_text(filled(FIRST, EXCHANGE))
    course.template().rename(course.template().with_suffix(".py~"))
    beside.rename(course.template())
    said = terminal.until("1.1 PASS(?s:.*)" + READY)
    said_plainly = terminal.said.replace("\x1b[1m", "")
    assert re.search(r"checking 1\.1 …( \d+ s)?\r\x1b\[K1\.1", said_plainly)
    assert "next: 1.2 " in said

    # the same task until n is pressed; two keys at once are two
    terminal.press("c")
    terminal.until("1.1 PASS(?s:.*)" + READY)
    terminal.press("nhhhhh")
    terminal.until("1.2 not started(?s:.*)" + READY)
    for level in range(1, 5):
        terminal.until(f"1.2 collectives.pass_around   hint {level} of 4")
        terminal.until(READY)
    last = terminal.until("that was the last hint(?s:.*)" + READY)
    assert "hint 1.2 --level 4" in last
    assert "near-code" not in last
    terminal.press("xq")
    assert terminal.end() == 10
    lines = re.sub(r"\x1b\[\d*[mK]", "", said).splitlines()
    assert all(len(line) <= 80 or "-m distlab" in line for line in lines), lines
    assert course.progress()[FIRST]["passed"]


@pytest.mark.slow
def test_what_changed_the_timeline_and_going_on(
    course: Course, terminal: Terminal
) -> None:
    terminal.until(READY)
    terminal.press("t")
    terminal.until("no timeline yet")
    course.fill(FIRST, "comm.send(tensor, 1)")
    page = course.state / "last" / "trace.html"
    terminal.until("timeline: ../state/last/trace.html(?s:.*)" + READY)
    assert re.search(r"1.1 collectives.exchange C1: \d ranks", page.read_text())
    terminal.press("t")
    terminal.until("timeline: ../state/last/trace.html")

    # the message arrives, and one more is sent
    back = "if comm.rank == 1:\n    comm.send(tensor, 0)\nelif comm.rank == 0:"
    course.fill(FIRST, f"{EXCHANGE}{back}\n    comm.recv(tensor, 1)")
    said = terminal.until("C2 NOT(?s:.*)" + READY)
    assert "  C1 now passes, C2 does not yet" in said
    assert said.index("checking 1.1, C1 passes now …") < said.index("C2 NOT")

    # n, before it has passed: asked twice, and any other key takes it back
    terminal.press("n")
    terminal.until("1.1 has not passed yet; n again skips it")
    terminal.press("tn")
    terminal.until("1.1 has not passed yet; n again skips it")
    terminal.press("n")
    terminal.until("1.2 not started(?s:.*)" + READY)


@pytest.mark.slow
def test_a_save_that_begins_the_next_task_goes_on_by_itself(
    course: Course, terminal: Terminal
) -> None:
    terminal.until(READY)
    course.fill(FIRST, EXCHANGE)
    terminal.until("1.1 PASS(?s:.*)" + READY)
    both = filled(SECOND, RING_OF_SENDS).split("def ring_shift")
    first = course.template().read_text().split("def ring_shift")
    course.template().write_text(f"{first[0]}def ring_shift{both[1]}")
    terminal.until("1.2 C1 DEADLOCK(?s:.*)ring-of-sends(?s:.*)" + READY)
    terminal.press("q")
    assert terminal.end() == 1


@pytest.mark.slow
def test_what_passed_before_is_looked_at_again(course: Course) -> None:
    course.fill(FIRST, EXCHANGE)
    assert course.distlab("check", "1.1").code == 0
    terminal = Terminal(course)
    try:
        # the current task is 1.2; breaking 1.1 must not go unnoticed
        assert "1.2 not started" in terminal.until(READY)
        course.fill(FIRST, "comm.send(tensor, 1)")
        said = terminal.until("1.1 passed before, and fails now:(?s:.*)" + READY)
        assert "[unmatched-send]" in said
        assert course.progress()[FIRST]["fails_now"]
        course.fill(FIRST, EXCHANGE)
        terminal.until("1.1 PASS(?s:.*)" + READY)
        assert not course.progress()[FIRST]["fails_now"]

        # a file that is not the current one, and that is no Python any more
        course.template("trainer").write_text("def (\n")
        terminal.until("line 1 is not Python(?s:.*)" + READY)
        course.template("trainer").write_text(pristine("trainer"))
        terminal.until(READY)
        course.fill(FIRST, "comm.send(tensor, 1)")
        terminal.until("1.1 passed before(?s:.*)" + READY)
        terminal.press("q")
        assert terminal.end() == 1
    finally:
        terminal.close()
    assert "! 1.1" in course.distlab("status").out


@pytest.mark.slow
def test_a_newer_save_and_q_end_a_judgement(course: Course, terminal: Terminal) -> None:
    terminal.until(READY)
    course.fill(FIRST, FOREVER)
    terminal.until("checking 1.1")
    course.fill(FIRST, EXCHANGE)
    said = terminal.until("1.1 PASS(?s:.*)" + READY)
    assert "saved again: starting over" in said
    assert "TIME" not in said
    course.fill(FIRST, FOREVER)
    terminal.until("checking 1.1")
    terminal.press("q")
    terminal.end()
    assert "TIME" not in terminal.said


def test_ctrl_c_in_watch(course: Course, terminal: Terminal) -> None:
    terminal.until(READY)
    terminal.press("\x03\x03")
    # Without a controlling terminal, the keys are no signal: send what a shell would.
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 130
    assert terminal.said.endswith("\r\nstopped; nothing is left running\r\n")


@pytest.mark.slow
def test_ctrl_c_while_ranks_spin(course: Course) -> None:
    course.fill(FIRST, FOREVER)
    process = course.popen("-m", "distlab", "watch", "1.1")
    while len(course.processes()) < 4:  # we, the zygote, two ranks
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    done = course.ended(process)
    assert (done.code, done.err) == (130, "\nstopped; nothing is left running\n")


@pytest.mark.slow
def test_watch_killed_leaves_nothing(course: Course) -> None:
    course.fill(FIRST, FOREVER)
    process = course.popen("-m", "distlab", "watch", "1.1", "--json")
    while len(course.processes()) < 4:
        time.sleep(0.05)
        assert process.poll() is None
    process.kill()
    assert course.ended(process).code == -signal.SIGKILL


@pytest.mark.slow
def test_watch_one_task_with_ranks_of_ones_choice(course: Course) -> None:
    course.fill(SECOND, "comm.sendrecv(outgoing, 0, incoming, 0)")
    terminal = Terminal(course, "pass_around", "-n", "1")
    try:
        said = terminal.until(READY)
        assert "1.2 PASS  n = 1" in said
        assert "it counts once it passes with all numbers" in " ".join(said.split())
        terminal.press("q")
        assert terminal.end() == 0
    finally:
        terminal.close()
    assert course.progress() == {}
