"""What `distlab.launch` writes itself: to a full disk, and after Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distlab.launch.logs import RankLog
from distlab.launch.report import interrupted
from tests.workbench.course import ROOT
from tests.workbench.launching import START, linux, script

# ── a full disk ─────────────────────────────────────────────────────────────────────

RESTARTS = "print('up', flush=True); sys.exit(generation == 1)"


@linux
@pytest.mark.slow
@pytest.mark.parametrize("full", ["stdout", "stderr"])
def test_a_full_disk_under_its_output_ends_no_training(
    tmp_path: Path, full: str
) -> None:
    command = [sys.executable, "-m", "distlab.launch", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--log-dir", str(tmp_path)]
    command.append(str(script(tmp_path, RESTARTS)))
    other = "stderr" if full == "stdout" else "stdout"
    with open("/dev/full", "w") as disk, open(tmp_path / "other", "w") as file:
        streams = {full: disk, other: file}
        done = subprocess.run(command, cwd=ROOT, check=False, timeout=300, **streams)
    said = (tmp_path / "other").read_text()
    assert done.returncode == 0, said
    assert "Traceback" not in said
    for rank in (0, 1):
        lines = (tmp_path / f"rank_{rank}.log").read_text().splitlines()
        assert lines[-2:] == [START.format(2), "up"]


@linux
def test_a_full_disk_under_the_logs_hinders_no_restart(tmp_path: Path) -> None:
    log = RankLog(0, tmp_path)
    with open("/dev/full", "w") as disk:
        os.dup2(disk.fileno(), log.descriptor)
    log.begin(2)
    assert log.last_lines(1) == []
    log.close()


# ── Ctrl-C before there are ranks ───────────────────────────────────────────────────

DURING_AN_IMPORT = """
import contextlib, os, runpy, signal, sys

class CtrlC:
    def find_spec(name, path, target=None):
        if name == "{module}":
            # C code that imports something may drop the exception, as torch's does.
            with contextlib.suppress({dropped}):
                os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC)
runpy.run_module("distlab.launch", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("module", "dropped"),
    [("distlab.launch.arguments", "()"), ("torch", "KeyboardInterrupt")],
)
def test_ctrl_c_during_an_import_is_one_line(
    tmp_path: Path, module: str, dropped: str
) -> None:
    program = DURING_AN_IMPORT.format(module=module, dropped=dropped)
    path = script(tmp_path, "")
    done = subprocess.run(
        [sys.executable, "-c", program, "--log-dir", str(tmp_path), str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = interrupted(signal.SIGINT, 130)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)
