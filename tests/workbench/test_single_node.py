"""The first drill of guide/deployment.md: one machine, and a rank that is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workbench.course import ROOT

pytestmark = pytest.mark.slow
SCRIPT = ROOT / "solutions/phase4_production/deployment/train_single_node.sh"
EPOCHS = 12


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The script that is shipped, on two ranks without a GPU; logs go to `folder`."""
    own = {
        "LOGS": str(folder),
        "RANKS": "2",
        "PYTHON": sys.executable,
        "TRAIN": str(ROOT / "distlab/distributed/example.py"),
    }
    return subprocess.Popen(
        [str(SCRIPT), f"--epochs={EPOCHS}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, **own},
    )


def ranks_of(launcher: int) -> list[int]:
    """The processes that it has started and that run the script."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if parent == launcher and any(word.endswith("example.py") for word in words):
            found.append(int(folder.name))
    return sorted(found)


def ending(log: str) -> str:
    return re.findall(r"\b2 ranks: (\w{8})$", log, re.MULTILINE)[0]


def test_a_killed_rank_is_started_again_and_no_saved_work_is_lost(
    tmp_path: Path,
) -> None:
    with start(tmp_path) as launcher:
        whole, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, whole
    lines: list[str] = []
    with start(tmp_path, "--checkpoint=checkpoints") as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            if "epoch 3 " in line and "epoch 3 " not in "".join(lines):
                os.kill(ranks_of(launcher.pid)[-1], signal.SIGKILL)
            lines.append(line)
    log = "".join(lines)
    assert launcher.returncode == 0, log
    assert re.search(r"\[distlab\] rank \d\b.*SIGKILL.*\b1\b.*\b3\b", log)
    assert log.count("epoch 1 ") == 1
    assert (tmp_path / "checkpoints").is_dir()  # relative to the user's folder
    assert ending(log) == ending(whole)
