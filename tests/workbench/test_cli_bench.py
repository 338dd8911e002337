"""`distlab bench`: which there are, and how one is stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from distlab.cli.bench import names
from tests.workbench.course import ROOT, Course

SLOW = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("started", "w").close()
time.sleep(600)
"""


def test_the_help_names_all_there_are(here: Course) -> None:
    assert names() == sorted(p.stem for p in (ROOT / "benchmarks").glob("[!_]*.py"))
    said = " ".join(here.distlab("bench", "--help", COLUMNS="400").out.split())
    assert ", ".join(names()) in said


def test_where_there_are_none_nothing_is_named(tmp_path: Path) -> None:
    assert names(tmp_path) == []


def test_ctrl_c_says_one_line_and_leaves_nothing(here: Course) -> None:
    (here.root / "benchmarks").mkdir()
    (here.root / "benchmarks" / "slow.py").write_text(SLOW)
    process = subprocess.Popen(
        [sys.executable, "-m", "distlab", "bench", "slow", "--json"],
        cwd=here.root,
        env=here.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 60
    while not (here.root / "started").exists() and time.monotonic() < until:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    done = here.ended(process)
    assert (done.code, done.out) == (130, "")
    assert re.fullmatch(r"\n.+\n", done.err)
