"""`distlab run`: scripts that hang for real, under our launcher and under torch's."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.workbench.course import ROOT
from tests.workbench.launching import (
    HEAD,
    Agent,
    ended,
    linux,
    outputs,
    script,
    torchrun,
)

GROUP = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(3)
"""
MISMATCH = GROUP + (
    """
say_pid()
for _ in range(4):
    dist.all_reduce(x)
if rank == 0:
    dist.barrier()  # HERE 0
else:
    dist.all_reduce(x)  # HERE 1
"""
)


def line_of(rank: int, program: str) -> int:
    """The marked line in the file that `script` writes."""
    lines = (HEAD + program).splitlines()
    return next(n for n, line in enumerate(lines, 1) if f"# HERE {rank}" in line)


def run(
    folder: Path, program: str, *flags: str, num_ranks: int = 3
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run a program; its exit code and output, and the report."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "distlab", "run", "-n", str(num_ranks)]
    command += ["--hang-report", str(report), *flags, str(script(folder, program))]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    found = json.loads(report.read_text()) if report.exists() else {}
    return done, found


def end_ranks(folder: Path, num_ranks: int) -> None:
    """End the ranks by SIGALRM, a second after the report."""
    until = time.monotonic() + 180
    while not (folder / "report.json").exists() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(1)  # the report must not end them
    for rank in range(num_ranks):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((folder / f"{rank}.pid").read_text()), signal.SIGALRM)


@linux
def test_the_ranks_their_calls_and_lines_are_named(tmp_path: Path) -> None:
    done, report = run(tmp_path, MISMATCH)
    assert done.returncode == 1, done.stderr
    assert (report["status"], report["differ"]) == ("mismatch", "operation")
    assert report["ranks_named"] == [0, 1, 2]
    rows = {row["rank"]: row for row in report["ranks"]}
    assert [rows[rank]["call"] for rank in range(3)] == ["barrier", *["all_reduce"] * 2]
    assert [rows[rank]["number"] for rank in range(3)] == [5, 5, 5]
    assert rows[0]["line"] == line_of(0, MISMATCH)
    assert rows[1]["line"] == rows[2]["line"] == line_of(1, MISMATCH)
    assert (rows[1]["shape"], rows[1]["dtype"]) == ([3], "float32")
    assert report["sentence"] in done.stderr
    assert done.stdout == ""  # no rank complains about a broken connection
    for rank in range(3):
        assert ended(int((tmp_path / f"{rank}.pid").read_text()))


@pytest.mark.slow
@linux
def test_a_rank_that_has_ended_is_named(tmp_path: Path) -> None:
    program = (
        GROUP
        + """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
for _ in range(2 + (rank == 1)):
    model(torch.ones(2, 4)).sum().backward()  # HERE 1
"""
    )
    done, report = run(tmp_path, program)
    assert (done.returncode, report["status"]) == (1, "deadlock")
    assert report["kind"] == "absent"
    assert report["absent"] == [0, 2]
    states = {row["rank"]: row["state"] for row in report["ranks"]}
    assert states[0] == states[2] == "has ended"
    assert report["ranks"][1]["line"] == line_of(1, program)  # started from C++


@pytest.mark.slow
@linux
def test_groups_messages_and_keys(tmp_path: Path) -> None:
    """Rank 0 waits for a key, 1 for a message with another tag, 2 in a new group."""
    program = (
        GROUP
        + """
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    dist.send(x, 1, tag=4)
    store.get("ready")  # HERE 0
elif rank == 1:
    dist.recv(x, 0, tag=5)  # HERE 1
else:
    dist.new_group([0, 1, 2])  # HERE 2
"""
    )
    done, report = run(tmp_path, program)
    # Gloo sends as soon as it is connected, or waits for the other side.
    has_sent = report["ranks"][0]["call"] == 'store.get("ready")'
    status = "deadlock" if has_sent else "mismatch"
    assert (done.returncode, report["status"]) == (1, status)
    rows = {row["rank"]: row for row in report["ranks"]}
    assert rows[0]["line"] == line_of(0, program) - (not has_sent)
    assert rows[1]["line"] == line_of(1, program)
    assert rows[2]["line"] == line_of(2, program)


@pytest.mark.slow
@linux
def test_who_is_slow_is_not_blamed(tmp_path: Path) -> None:
    """Asleep, in Python, in C without the GIL, and with another thread."""
    program = (
        GROUP
        + """
import threading
for step in range(4):
    if rank == step:
        if step == 0:
            time.sleep(1.5)
        elif step == 1:
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                pass
        elif step == 2:
            subprocess.run(["sleep", "1.5"])
    if step == 3 and rank == 0:
        late = threading.Thread(target=lambda: (time.sleep(1.5), dist.barrier()))
        late.start()
        late.join()
    else:
        dist.barrier()
dist.destroy_process_group()
"""
    )
    done, report = run(tmp_path, program)
    assert (done.returncode, done.stderr, report) == (0, "", {})


@pytest.mark.slow
@linux
def test_a_hang_counts_as_a_failure_if_the_user_wants_that(tmp_path: Path) -> None:
    once = (
        GROUP
        + "if generation > 1 or rank:\n    dist.barrier()\n"
        + ("elif generation == 1:\n    dist.all_reduce(x)\nprint('done', generation)\n")
    )
    done, report = run(tmp_path, once, "--on-hang", "restart", "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done 2") == 3
    assert report["status"] == "mismatch"
    done, _ = run(tmp_path, once, "--on-hang", "abort", "--max-restarts", "1")
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.slow
@linux
def test_a_report_alone_leaves_the_ranks_as_they_are(tmp_path: Path) -> None:
    program = GROUP + "say_pid()\ndist.recv(x, (rank + 1) % 2)\n"  # both receive
    with ThreadPoolExecutor(1) as thread:
        thread.submit(end_ranks, tmp_path, 2)
        done, report = run(tmp_path, program, "--on-hang", "report", num_ranks=2)
    assert report["status"] == "deadlock"
    assert done.returncode == 128 + 14, done.stderr  # only the alarm has ended them


@pytest.mark.slow
@linux
def test_without_a_call_for_long_nothing_is_proved(tmp_path: Path) -> None:
    program = GROUP + (
        "say_pid()\nif rank == 1:\n    time.sleep(600)  # HERE 1\ndist.all_reduce(x)\n"
    )
    with ThreadPoolExecutor(1) as thread:
        thread.submit(end_ranks, tmp_path, 3)
        done, report = run(tmp_path, program, "--no-progress", "6", "--hang-stacks")
    assert (report["status"], report["ranks_named"]) == ("no-progress", [1])
    assert report["ranks"][1]["line"] == line_of(1, program)
    assert done.returncode == 128 + 14


@pytest.mark.slow
@linux
def test_under_torchrun_the_first_rank_judges(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [*torchrun(tmp_path, 3), "-m", "distlab.run", "--hang-report"]
    done = subprocess.run(
        [*command, str(report), str(script(tmp_path, MISMATCH))],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    found = json.loads(report.read_text())
    assert found["status"] == "mismatch"
    assert {row["rank"]: row["line"] for row in found["ranks"]} == {
        0: line_of(0, MISMATCH),
        1: line_of(1, MISMATCH),
        2: line_of(1, MISMATCH),
    }
    assert done.returncode == 1
    assert found["sentence"] in done.stderr  # once from us, once in torchrun's summary
    for rank in range(3):
        assert ended(int((tmp_path / f"{rank}.pid").read_text()))


@pytest.mark.slow
@linux
def test_on_two_nodes_there_is_one_report(
    agents: Callable[..., list[Agent]], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    flags = ["--explain-hangs", "--hang-report", str(report)]
    both = agents(MISMATCH, flags=[flags, flags])
    said = outputs(both)
    assert [agent.returncode for agent in both] == [1, 1], said
    found = json.loads(report.read_text())
    assert (found["status"], found["ranks_named"]) == ("mismatch", [0, 1, 2, 3])
    assert found["sentence"] in said[0]
    assert found["sentence"] not in said[1]
