"""The shipped SLURM scripts on two virtual nodes: `make test-slurm`."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deployment.virtual_slurm import VirtualSlurm, missing, virtual_slurm

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "solutions/phase4_production/deployment"
EXAMPLE = "-m distlab.distributed.example"
LONG, SHORT = 15, 3
HANGS = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(3)
if dist.get_rank() == 0:
    dist.barrier()
else:
    dist.all_reduce(x)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualSlurm]:
    if missing():
        pytest.skip(missing())
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)  # munge refuses a socket in a folder that is closed
    with virtual_slurm(folder) as found:
        yield found


def submit(
    slurm: VirtualSlurm,
    script: str,
    log: Path,
    *arguments: str,
    train: str = EXAMPLE,
) -> str:
    return slurm.run(
        "sbatch",
        "--parsable",
        f"--output={log}",
        f"--chdir={ROOT}",
        str(FOLDER / script),
        *arguments,
        PYTHON=sys.executable,
        PYTHONPATH=str(ROOT),
        RANKS_PER_NODE="1",
        TRAIN=train,
    )


def last_line(log: Path) -> str:
    found = re.findall(r"^accuracy .*", log.read_text(), re.MULTILINE)
    assert found, log.read_text()[-2000:]
    return str(found[-1])


def test_two_nodes_train_and_a_killed_worker_is_requeued_and_resumes(
    slurm: VirtualSlurm, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole.log", tmp_path / "broken.log"
    folder = tmp_path / "checkpoints"
    epochs = f"--epochs={LONG}"
    job = submit(slurm, "slurm.sbatch", whole, epochs)
    slurm.wait(job, "COMPLETED")
    assert " 2 ranks" in last_line(whole)

    job = submit(slurm, "slurm.sbatch", broken, epochs, f"--checkpoint={folder}")
    wait_for_checkpoint(folder)
    os.kill(worker(folder), signal.SIGKILL)
    back_in_the_queue(slurm, job, broken, times=1)
    slurm.wait(job, "COMPLETED")
    text = broken.read_text()
    assert re.search(r"^start 2 .*3", text, re.M)
    first_again = re.findall(r"^epoch (\d+) ", text.partition("start 2")[2], re.M)[0]
    assert 1 < int(first_again) <= LONG
    assert last_line(broken) == last_line(whole)  # the same bits


def test_srun_alone_starts_the_ranks(slurm: VirtualSlurm, tmp_path: Path) -> None:
    log = tmp_path / "srun.log"
    job = submit(slurm, "slurm_srun.sbatch", log, f"--epochs={SHORT}")
    slurm.wait(job, "COMPLETED")
    assert " 4 ranks" in last_line(log)


def test_srun_explains_a_hang(slurm: VirtualSlurm, tmp_path: Path) -> None:
    program, report = tmp_path / "program.py", tmp_path / "report.json"
    program.write_text(HANGS)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o777)
    train = f"-m distlab.run --hang-report {report} {program}"
    job = submit(slurm, "slurm_srun.sbatch", tmp_path / "hang.log", train=train)
    slurm.wait(job, "FAILED")
    found = json.loads(report.read_text())
    assert (found["status"], found["ranks_named"]) == ("mismatch", [0, 1, 2, 3])
    assert {row["rank"]: row["line"] for row in found["ranks"]} == {
        rank: HANGS.splitlines().index(f"    {call}") + 1
        for rank, call in enumerate(["dist.barrier()", *["dist.all_reduce(x)"] * 3])
    }


def test_a_crash_loop_ends(slurm: VirtualSlurm, tmp_path: Path) -> None:
    log = tmp_path / "loop.log"
    job = submit(slurm, "slurm.sbatch", log, "--epochs=none")
    for start in (1, 2):
        back_in_the_queue(slurm, job, log, times=start)
    slurm.wait(job, "FAILED")
    assert len(re.findall(r"^start \d .*3", log.read_text(), re.M)) == 3


def wait_for_checkpoint(folder: Path) -> None:
    until = time.monotonic() + 60
    while not (folder.exists() and list(folder.glob("step-*.json"))):
        assert time.monotonic() < until, "no checkpoint came"
        time.sleep(0.05)


def back_in_the_queue(slurm: VirtualSlurm, job: str, log: Path, times: int) -> None:
    """Wait until it has been requeued so often, then spare it SLURM's two minutes."""
    until = time.monotonic() + 120
    while not log.exists() or log.read_text().count("back into the queue") < times:
        assert time.monotonic() < until, log.read_text()[-2000:]
        time.sleep(0.2)
    slurm.wait(job, "PENDING")
    # slurmd refuses a job that starts again in the second in which it was revoked.
    time.sleep(2.0)
    slurm.run("scontrol", "update", f"jobid={job}", "starttime=now")


def worker(folder: Path) -> int:
    """A rank of the job that saves there; torchrun's own process is none."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
        except OSError:
            continue
        is_rank = words[1:2] == ["-u"] and f"--checkpoint={folder}" in words
        if is_rank:
            return int(process.name)
    raise AssertionError("no rank runs")
