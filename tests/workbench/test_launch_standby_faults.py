"""Unlucky moments of an elastic training: hangs, deaths, signals between groups."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.workbench.course import ROOT
from tests.workbench.launching import linux

PROGRAM = """\
import os, pathlib, signal, sys, threading, time
import torch
import distlab.distributed as dist
from distlab.comm import PeerLost
from distlab.distributed import regrouping
from distlab.launch.control import Member

here = pathlib.Path(__file__).parent
torch.set_num_threads(1)

def first(name):
    try:
        (here / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def wait_for(name):
    while not (here / name).exists():
        time.sleep(0.01)

def kill(which=signal.SIGKILL):
    os.kill(os.getpid(), which)

def in_step(step, rank, generation): pass
OPTIONS = {}
NUM_STEPS = 30

BEFORE

dist.init_process_group()
torch.manual_seed(0)
model = dist.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = {"model": model, "optimizer": optimizer}
for step in dist.elastic(state, **OPTIONS).steps(NUM_STEPS):
    with step:
        rank, generation = dist.get_rank(), dist.default_comm().generation
        print("step", step.index, "of generation", generation, flush=True)
        in_step(step.index, rank, generation)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        time.sleep(0.02)
"""

LAUNCH = """
import runpy
runpy.run_module("distlab.launch", run_name="__main__", alter_sys=True)
"""

Launch = Callable[..., subprocess.Popen[str]]

pytestmark = [linux, pytest.mark.slow]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts the program with these lines before the training."""
    started = []

    def start(before: str, *flags: str, agent: str = "") -> subprocess.Popen[str]:
        path = tmp_path / "program.py"
        path.write_text(PROGRAM.replace("BEFORE", textwrap.dedent(before)))
        command = [
            sys.executable,
            "-c",
            f"{agent}\n{LAUNCH}",
            "--log-dir",
            str(tmp_path),
        ]
        process = subprocess.Popen(
            [*command, *flags, str(path)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # These tests may themselves run under nohup, which the launcher respects.
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said_by(process: subprocess.Popen[str]) -> str:
    """What the launcher says until its end; a hang fails here."""
    return process.communicate(timeout=240)[1]


def steps_in(folder: Path, rank: int) -> list[tuple[int, int]]:
    """(step, generation) of each step that the rank has begun."""
    text = (folder / f"rank_{rank}.log").read_text()
    found = re.findall(r"step (\d+) of generation (\d+)", text)
    return [(int(step), int(generation)) for step, generation in found]


def wait_for_steps(folder: Path, count: int) -> None:
    log = folder / "rank_0.log"
    until = time.monotonic() + 240
    while not log.exists() or len(steps_in(folder, 0)) < count:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_trainer_that_hangs_after_a_checkpoint_is_found(
    launch: Launch, tmp_path: Path
) -> None:
    hangs = """
    OPTIONS = {"folder": here / "saved", "save_every": 2}
    (here / "saved").mkdir(exist_ok=True)
    def in_step(step, rank, generation):
        if (step, rank) == (12, 1) and first("hung"):
            time.sleep(1000)
    """
    flags = ("--nproc-per-node", "2", "--standby", "1", "--freeze-timeout", "2")
    process = launch(hangs, *flags)
    said = said_by(process)
    assert process.returncode == 0, said
    assert re.search(r"rank 1\b.*SIGKILL", said)
    assert steps_in(tmp_path, 0)[-1] == (29, 2)


def test_a_member_that_joins_and_dies_is_not_waited_for(
    launch: Launch, tmp_path: Path
) -> None:
    """Rank 0 dies; rank 1 joins the next group and dies; rank 2 joins after that."""
    deaths = """
    number = next(i for i in range(9) if first(f"started {i}"))
    if number > 3:  # who takes the second place is slow
        wait_for("rank 2 has joined")
        time.sleep(1)
    me = {}
    joins = Member.join
    def join(member, report):
        if number == 3:
            (here / "the first place is taken").touch()
        if me.get("rank") == 1:
            threading.Thread(target=die).start()
        if me.get("rank") == 2:
            (here / "rank 2 has joined").touch()
        return joins(member, report)
    def die():
        wait_for("the first place is taken")
        time.sleep(0.5)
        (here / "rank 1 is gone").touch()
        kill()
    Member.join = join
    def in_step(step, rank, generation):
        me["rank"] = rank if generation == 1 else None
        if (step, generation) == (10, 1):
            if rank == 0:
                (here / "rank 0 is gone").touch()
                kill()
            if rank == 1:  # gloo would see the loss after rank 2 has come
                wait_for("rank 0 is gone")
                raise PeerLost(1, 10, 0, 0.0)
            if rank == 2:
                wait_for("rank 1 is gone")
                time.sleep(1)
    """
    flags = ("--nproc-per-node", "3", "--standby", "0", "--max-restarts", "5")
    process = launch(deaths, *flags, "--freeze-timeout", "100")
    said = said_by(process)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert steps_in(tmp_path, 2)[-1][0] == 29


def test_one_frozen_newcomer_does_not_cost_the_others_their_steps(
    launch: Launch, tmp_path: Path
) -> None:
    freezes = """
    regrouping.FORM_S = 3.0
    make_group = regrouping.make_gloo_group
    def frozen(*arguments):
        is_new = not me.get("trains") and (here / "rank 0 is gone").exists()
        if is_new and first("froze"):
            kill(signal.SIGSTOP)
        return make_group(*arguments)
    regrouping.make_gloo_group = frozen
    me = {}
    def in_step(step, rank, generation):
        me["trains"] = True
        if (step, rank, generation) == (10, 0, 1):
            (here / "rank 0 is gone").touch()
            kill()
    """
    flags = ("--nproc-per-node", "3", "--standby", "1", "--max-restarts", "5")
    # A form that takes too long is noticed sooner than it is for users.
    soon = "import distlab.launch.agent as agent; agent.FORMING_S = 8.0"
    process = launch(freezes, *flags, agent=soon)
    said = said_by(process)
    assert process.returncode == 0, said
    later = [step for step, generation in steps_in(tmp_path, 1) if generation > 1]
    assert later[0] == 10


def test_a_signal_to_all_processes_is_still_a_notice(
    launch: Launch, tmp_path: Path
) -> None:
    saves = """
    NUM_STEPS = 100_000
    OPTIONS = {"folder": here / "saved"}
    (here / "saved").mkdir(exist_ok=True)
    """
    process = launch(saves, "--nproc-per-node", "2", "--standby", "1")
    wait_for_steps(tmp_path, 10)
    os.killpg(process.pid, signal.SIGHUP)
    said = said_by(process)
    assert process.returncode == 129, said
    (manifest,) = (tmp_path / "saved").glob("*.json")
    assert int(manifest.stem[5:]) == len(steps_in(tmp_path, 0))


def test_ctrl_c_while_the_processes_start_is_one_line(
    launch: Launch, tmp_path: Path
) -> None:
    process = launch("", "--nproc-per-node", "2", "--standby", "1")
    while not list(tmp_path.glob("*.log")):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    said = said_by(process)
    assert process.returncode == 130, said
    assert "Traceback" not in said


def test_sigterm_between_two_groups_ends_the_survivor_at_once(
    launch: Launch, tmp_path: Path
) -> None:
    """The grace period is longer than the test waits: no time limit ends it here."""
    waits = """
    OPTIONS = {"folder": here / "saved", "save_every": 4}
    (here / "saved").mkdir(exist_ok=True)
    if not first("started 0") and not first("started 1"):
        (here / "the next one starts").touch()
        time.sleep(1000)  # SIGTERM ends it
    def in_step(step, rank, generation):
        if (step, rank) == (10, 1):
            kill()
    """
    flags = ("--nproc-per-node", "2", "--standby", "0", "--max-restarts", "3")
    process = launch(waits, *flags, "--grace-period", "1000")
    until = time.monotonic() + 240
    while not (tmp_path / "the next one starts").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(1)  # the survivor has lost its peer by now, or will a moment later
    process.send_signal(signal.SIGTERM)
    said = said_by(process)
    assert process.returncode == 143, said
    saved = sorted(path.name for path in (tmp_path / "saved").glob("*.json"))
    assert saved[-1] == "step-8.json"
