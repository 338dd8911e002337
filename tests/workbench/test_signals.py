"""How a rank's process ended, in words: the signal, what it means, and the line."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from distlab.runner import RankRecord
from distlab.runner.autopsy import ended_by_transport, explain_end
from distlab.runner.record import LINE_LOST
from distlab.runner.stacks import read_from
from tests.workbench.golden import Golden

TEMPLATE = str(Path(__file__).parent / "template_ring.py")
FRAMES = """Fatal Python error: Segmentation fault

Current thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "a/f.py", line 7 in f
  File "b.py", line 99999999999999999999 in forged
"""


def test_how_a_process_ended(golden: Golden) -> None:
    stack = ((TEMPLATE, 30), ("/usr/lib/python3.11/ctypes/__init__.py", 519))
    told = []
    for status, named in (
        (signal.SIGTERM, ["SIGTERM", "template_ring.py:30"]),
        (signal.SIGSEGV, ["SIGSEGV", "template_ring.py:30"]),
        (signal.SIGABRT, ["SIGABRT", "template_ring.py:30"]),
        (40, ["signal 40", "template_ring.py:30"]),
        (3 << 8, ["status 3"]),
        (LINE_LOST << 8, []),
    ):
        record = RankRecord(rank=0, status="died", exit_status=int(status), stack=stack)
        said = explain_end(record)
        assert re.findall(r"SIG\w+|signal \d+|status \d+|\w+\.py:\d+", said) == named
        told.append(said)
    golden("runner/process-ended", "\n".join(told))


def test_not_every_abort_of_the_transport_is_about_bytes() -> None:
    lost = "throwing 'gloo::EnforceNotMet' what(): [enforce fail at loop.cc] nfds != -1"
    record = RankRecord(rank=0, status="died", exit_status=int(signal.SIGABRT))
    record.output = lost
    assert not ended_by_transport(record)
    record.output = lost.replace("nfds != -1", "op.preamble.length <= op.nbytes")
    assert ended_by_transport(record)


def test_a_stack_is_read_outermost_first(tmp_path: Path) -> None:
    path = tmp_path / "stack0"
    path.write_text(FRAMES)
    assert read_from(path) == (
        ("a/f.py", 7),
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
