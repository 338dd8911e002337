"""The learner's file under torchrun: what is told about a failure, and what is left."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distlab.curriculum.units import read_source
from distlab.grading import NotYetError
from distlab.grading.checks.trainer.main_program import UNDER_TORCHRUN
from distlab.grading.checks.trainer.main_reference import right_weights
from distlab.grading.checks.trainer.main_torchrun import EPOCHS, expect_clean_end
from distlab.grading.harness import Implementation, PlayedRuns
from distlab.grading.kit.flat import flat
from distlab.runner import Cluster, Limits
from tests.workbench.judging import CURRICULUM
from tests.workbench.launching import torchrun

REFERENCE = read_source(CURRICULUM, CURRICULUM.units["trainer"], "reference")
SLEEPS = """
import os, pathlib, time
here = pathlib.Path({folder!r})
(here / f"{{os.environ['RANK']}}.pid").write_text(str(os.getpid()))
print("sleeping", flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    """Whether a process runs: one that is dead and not buried does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] != "Z"


def judge(cluster: Cluster, text: str, limit_s: float = 60.0) -> None:
    mine = replace(REFERENCE, side="file", path=Path("mine_trainer.py"), text=text)
    impl = Implementation(mine, REFERENCE)
    runs = PlayedRuns(cluster, impl, 2, 7, Limits(seconds=limit_s))
    expect_clean_end(runs, UNDER_TORCHRUN)


def test_what_the_file_raised_is_told_and_its_output_shown(cluster: Cluster) -> None:
    text = "print('so far so good', flush=True)\n{}['weights']\n"
    with pytest.raises(NotYetError) as caught:
        judge(cluster, text)
    assert caught.value.message.endswith("1: KeyError: 'weights'")
    assert "mine_trainer.py" in caught.value.output


def test_without_distlab_an_import_of_it_fails(cluster: Cluster) -> None:
    with pytest.raises(NotYetError) as caught:
        judge(cluster, "from distlab.comm import Comm\n")
    assert caught.value.slug == "still-needs-distlab"


def test_a_worker_that_is_killed_is_a_failure(cluster: Cluster) -> None:
    text = "import os\nos.kill(os.getpid(), 9)\n"
    with pytest.raises(NotYetError, match=r"-9\b"):
        judge(cluster, text)


def test_weights_that_were_not_saved_are_missed(cluster: Cluster) -> None:
    with pytest.raises(NotYetError, match=r"\bweights\.pt\b"):
        judge(cluster, "x = 1\n")


def test_nothing_is_left_when_the_time_is_up(cluster: Cluster, tmp_path: Path) -> None:
    text = SLEEPS.format(folder=str(tmp_path))
    with pytest.raises(NotYetError) as caught:
        judge(cluster, text, limit_s=5.0)
    assert "sleeping" in caught.value.output
    cluster.settle()
    pids = {int(path.read_text()) for path in tmp_path.glob("*.pid")}
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.slow
def test_the_reference_under_the_command_itself(tmp_path: Path) -> None:
    command = [*torchrun(tmp_path, 2), str(REFERENCE.path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    # One time in twenty torch 2.13's gloo aborts a process that has done everything.
    codes = (subprocess.run(command, cwd=tmp_path, env=env).returncode for _ in "123")
    assert 0 in codes
    saved = flat(torch.load(tmp_path / "weights.pt", weights_only=True))
    torch.testing.assert_close(saved, right_weights(EPOCHS, whole=True))
