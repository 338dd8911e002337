"""`distlab.launch --nnodes MIN:MAX`: the other nodes go on without one that is gone."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from distlab.chaos import partition
from distlab.chaos.faults import FIRED
from tests.workbench.course import ROOT
from tests.workbench.launching import Agent, linux, log, outputs, script

SHRINKS = """
print("start", generation, rank, os.environ["WORLD_SIZE"], flush=True)
say_pid()
if os.environ["WORLD_SIZE"] == "3" and generation == 1:
    for other in (0, 1, 2):
        wait_for(f"{other}.pid")
    time.sleep(600)
"""


@linux
@pytest.mark.slow
def test_the_other_nodes_go_on_without_one_that_is_gone(
    agents: Callable[..., list[Agent]], tmp_path: Path
) -> None:
    flags = ("--nnodes", "2:3", "--nproc-per-node", "1", "--max-restarts", "2")
    three = agents(SHRINKS, flags=[(*flags, "--last-call", "8")] * 3)
    for rank in range(3):
        while not (tmp_path / f"{rank}.pid").exists():
            time.sleep(0.05)
    three[1].kill()
    said = outputs([three[0], three[2]])
    assert [three[0].returncode, three[2].returncode] == [0, 0], said
    assert "node 1 is gone, and its ranks with it" in said[0]
    assert "goes on with 2 of 3 nodes: 2 ranks" in said[0]
    assert log(tmp_path, 0)[-1] == "start 2 0 2"
    assert log(tmp_path, 1) == [
        "start 1 1 3",  # of node 1, which is gone
        "--- start 2 of this rank ---",
        "start 2 1 2",  # node 2 has this rank now
    ]
    assert log(tmp_path, 2) == ["start 1 2 3"]


@linux
@pytest.mark.slow
def test_a_node_that_comes_late_is_there_after_the_next_restart(
    agents: Callable[..., list[Agent]], tmp_path: Path
) -> None:
    program = """
    print("start", generation, rank, os.environ["WORLD_SIZE"], flush=True)
    if generation == 1:
        wait_for("late")
        sys.exit(7)
    """
    flags = ("--nnodes", "1:2", "--last-call", "1", "--max-restarts", "1")
    two = agents(program, flags=[flags])
    while not (tmp_path / "rank_1.log").exists() or not log(tmp_path, 1):
        time.sleep(0.05)
    two = agents(program, flags=[(*flags, "--node-rank", "1")])
    assert two[1].stdout is not None
    assert two[1].stdout.readline() == (
        "[distlab] waits: the others have begun without it\n"
    )
    (tmp_path / "late").touch()
    said = outputs(two)
    assert [agent.returncode for agent in two] == [0, 0], said
    assert "goes on with 1 of 2 nodes: 2 ranks" in said[0]
    assert "goes on with 2 of 2 nodes: 4 ranks" in said[0]
    assert [log(tmp_path, rank)[-1] for rank in range(4)] == [
        f"start 2 {rank} 4" for rank in range(4)
    ]


@linux
@pytest.mark.slow
def test_a_node_that_waits_for_its_turn_can_be_interrupted(
    agents: Callable[..., list[Agent]], tmp_path: Path
) -> None:
    program = """
    print("start", generation, rank, flush=True)
    wait_for("end")
    """
    flags = ("--nnodes", "1:2", "--last-call", "1")
    agents(program, flags=[flags])
    while not (tmp_path / "rank_1.log").exists() or not log(tmp_path, 1):
        time.sleep(0.05)
    first, late = agents(program, flags=[(*flags, "--node-rank", "1")])
    assert late.stdout is not None
    assert "waits" in late.stdout.readline()
    late.send_signal(signal.SIGINT)
    said = late.communicate(timeout=100)[0]
    assert late.returncode == 130, said
    (tmp_path / "end").touch()
    said = outputs([first])[0]
    assert first.returncode == 0, said


@linux
@pytest.mark.slow
def test_what_a_returning_node_kills_is_no_failure_of_the_next_generation(
    agents: Callable[..., list[Agent]], tmp_path: Path
) -> None:
    program = """
    print("start", generation, rank, flush=True)
    say_pid()
    if generation == 1:
        time.sleep(600)
    """
    flags = ("--max-restarts", "1")
    two = agents(program, flags=[flags, flags])
    for rank in range(4):
        while not (tmp_path / f"{rank}.pid").exists():
            time.sleep(0.05)
    two[1].send_signal(signal.SIGSTOP)
    assert two[0].stdout is not None
    assert any("node 1 is gone" in line for line in two[0].stdout)
    two[1].send_signal(signal.SIGCONT)
    said = outputs(two)
    assert [agent.returncode for agent in two] == [0, 0], said
    assert [log(tmp_path, rank)[-1] for rank in range(4)] == [
        f"start 2 {rank}" for rank in range(4)
    ]


@linux
@pytest.mark.slow
def test_with_the_link_cut_for_good_the_other_node_goes_on(tmp_path: Path) -> None:
    if why_not := partition.why_not():
        pytest.skip(why_not)
    program = """
    print("start", generation, rank, os.environ["WORLD_SIZE"], flush=True)
    if generation == 1:
        if rank == 0:
            (here / "FIRED").touch()
        time.sleep(600)
    """
    program = program.replace("FIRED", FIRED)
    launch = [sys.executable, "-m", "distlab.launch"]
    flags = ["--max-restarts", "1", "--log-dir", str(tmp_path)]
    command = [*launch, *flags, str(script(tmp_path, program))]
    done = subprocess.run(
        partition.inside(1e6, tmp_path, command, min_nodes=1),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "goes on with 1 of 2 nodes: 1 rank\n" in done.stderr
    assert log(tmp_path, 0)[-1] == "start 2 0 1"
    assert "node 0 at 10.78.0.1:29500 does not answer" in done.stderr
    assert done.returncode == 0  # that of node 0


@linux
@pytest.mark.slow
def test_fewer_nodes_than_the_least_do_not_begin(
    agents: Callable[..., list[Agent]], tmp_path: Path
) -> None:
    flags = ("--nnodes", "2:3", "--last-call", "0.2", "--start-timeout", "2")
    (alone,) = agents("", flags=[flags])
    assert "no agent of nodes 1, 2 came within 2 s" in outputs([alone])[0]
    assert alone.returncode == 2
