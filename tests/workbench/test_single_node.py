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
EPOCHS = 40


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The script that is shipped, on two ranks without a GPU; logs go to `folder`."""
    own = {
        "LOGS": str(folder),
        "RANKS": "2",
        "PYTHON": sys.executable,
        "TRAIN": "distlab/distributed/example.py",
    }
    return subprocess.Popen(
        [str(SCRIPT), f"--epochs={EPOCHS}", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
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
    return re.findall(r"the same weights on 2 ranks: \w{8}", log)[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    with start(tmp_path_factory.mktemp("whole")) as launcher:
        log, _ = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, log
    return log


@pytest.mark.parametrize("keeps", [True, False])
def test_a_killed_rank_is_started_again_and_work_is_kept_if_it_was_saved(
    whole: str, tmp_path: Path, keeps: bool
) -> None:
    folder = tmp_path / "checkpoints"
    lines: list[str] = []
    with start(tmp_path, *([f"--checkpoint={folder}"] if keeps else [])) as launcher:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            if "epoch 5 " in line and "epoch 5 " not in "".join(lines):
                os.kill(ranks_of(launcher.pid)[-1], signal.SIGKILL)
            lines.append(line)
    log = "".join(lines)
    assert launcher.returncode == 0, log
    assert "was ended by SIGKILL" in log
    assert "restart 1, at most 3" in log
    assert log.count("epoch 1 ") == (1 if keeps else 2)
    assert ending(log) == ending(whole)
