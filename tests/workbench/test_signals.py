"""How a rank's process ended, in words: the signal, what it means, and the line."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from distlab.runner import RankRecord
from distlab.runner.autopsy import ended_by_transport, explain_end
from distlab.runner.record import LINE_LOST
from distlab.runner.stacks import read_from

TEMPLATE = str(Path(__file__).parent / "template_ring.py")
FRAMES = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "a file.py", line 7 in f
  File "b.py", line 99999999999999999999 in forged
"""


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (signal.SIGTERM, "was killed by SIGTERM at template_ring.py:30"),
        (
            signal.SIGSEGV,
            "was killed by SIGSEGV at template_ring.py:30 "
            "(C code read or wrote where it may not)",
        ),
        (40, "was killed by signal 40 at template_ring.py:30"),
        (
            LINE_LOST << 8,
            "closed or replaced a file descriptor of distlab's, and was not heard of",
        ),
    ],
)
def test_how_a_process_ended(status: int, words: str) -> None:
    stack = ((TEMPLATE, 30), ("/usr/lib/python3.11/ctypes/__init__.py", 519))
    record = RankRecord(rank=0, status="died", exit_status=int(status), stack=stack)
    assert explain_end(record) == words


def test_not_every_abort_of_the_transport_is_about_bytes() -> None:
    lost = "throwing 'gloo::EnforceNotMet' what(): [enforce fail at loop.cc] nfds != -1"
    record = RankRecord(rank=0, status="died", exit_status=int(signal.SIGABRT))
    record.output = lost
    assert not ended_by_transport(record)
    assert explain_end(record) == (
        "was killed by SIGABRT (something in it called abort)"
    )
    record.output = lost.replace("nfds != -1", "op.preamble.length <= op.nbytes")
    assert ended_by_transport(record)


def test_a_stack_is_read_outermost_first(tmp_path: Path) -> None:
    path = tmp_path / "stack0"
    path.write_text(FRAMES)
    assert read_from(path) == (
        ("a file.py", 7),
        ("/usr/lib/python3.11/ctypes/__init__.py", 519),
    )


def test_nothing_in_place_of_a_stack_is_waited_for(tmp_path: Path) -> None:
    assert read_from(tmp_path / "absent") == ()
    assert read_from(tmp_path) == ()
    os.mkfifo(tmp_path / "fifo")
    assert read_from(tmp_path / "fifo") == ()
    (tmp_path / "text").write_text(FRAMES)
    (tmp_path / "link").symlink_to(tmp_path / "text")
    assert read_from(tmp_path / "link") == ()
    (tmp_path / "endless").symlink_to("/dev/zero")
    assert read_from(tmp_path / "endless") == ()
