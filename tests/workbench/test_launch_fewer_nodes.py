"""`distlab.launch --nnodes MIN:MAX`: the other nodes go on without one that is gone."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distlab.chaos import partition
from distlab.chaos.faults import FIRED
from distlab.launch import DistributedLauncher, LaunchConfig, LaunchError
from distlab.launch.report import going_on
from tests.workbench.course import ROOT
from tests.workbench.launching import (
    Agent,
    free_port,
    linux,
    log,
    outputs,
    script,
    wait_for,
)

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
    flags += ("--last-call", "2")
    others = [(*flags, "--node-rank", str(node)) for node in (1, 2)]
    agents(SHRINKS, flags=others)
    for rank in (1, 2):  # their agents are up: at node 0's call all three are there
        wait_for(tmp_path / f"rank_{rank}.log")
    one, two, zero = agents(SHRINKS, flags=[(*flags, "--node-rank", "0")])
    for rank in range(3):
        wait_for(tmp_path / f"{rank}.pid")
    one.kill()
    said = outputs([zero, two])
    assert [zero.returncode, two.returncode] == [0, 0], said
    assert "node 1" in said[0]
    assert going_on(2, 3, 2) in said[0]
    assert log(tmp_path, 0)[-1] == "start 2 0 2"
    of_node_1, _, of_node_2 = log(tmp_path, 1)  # node 2 has this rank now
    assert (of_node_1, of_node_2) == ("start 1 1 3", "start 2 1 2")
    assert log(tmp_path, 2) == ["start 1 2 3"]


@linux
@pytest.mark.slow
def test_a_node_that_comes_late_waits_for_the_next_restart_or_is_interrupted(
    agents: Callable[..., list[Agent]], tmp_path: Path
) -> None:
    program = """
    print("start", generation, rank, os.environ["WORLD_SIZE"], flush=True)
    say_pid()
    if generation == 1:
        wait_for("late")
        sys.exit(7)
    """
    flags = ("--nnodes", "1:3", "--last-call", "2", "--max-restarts", "1")
    agents(program, flags=[flags])
    wait_for(tmp_path / "1.pid")
    for node in (1, 2):  # the first one is interrupted while it waits
        agent = agents(program, flags=[(*flags, "--node-rank", str(node))])[node]
        assert agent.stdout is not None
        assert agent.stdout.readline().startswith("[distlab] waits")
        if node == 1:
            agent.send_signal(signal.SIGINT)
            assert agent.wait(100) == 130
    (tmp_path / "late").touch()
    first, _, second = agents(program, flags=[])
    said = outputs([first, second])
    assert [first.returncode, second.returncode] == [0, 0], said
    assert going_on(1, 3, 2) in said[0]
    assert going_on(2, 3, 4) in said[0]
    assert [log(tmp_path, rank)[-1] for rank in range(4)] == [
        f"start 2 {rank} 4" for rank in range(4)
    ]


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
    flags = ("--max-restarts", "1", "--node-timeout", "4")
    two = agents(program, flags=[flags, flags])
    for rank in range(4):
        wait_for(tmp_path / f"{rank}.pid")
    two[1].send_signal(signal.SIGSTOP)
    assert two[0].stdout is not None
    assert any("node 1 " in line for line in two[0].stdout)
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
    flags = ["--max-restarts", "1", "--node-timeout", "4", "--log-dir", str(tmp_path)]
    command = [*launch, *flags, str(script(tmp_path, program))]
    done = subprocess.run(
        partition.inside(1e6, tmp_path, command, min_nodes=1),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert going_on(1, 2, 1) in done.stderr
    assert log(tmp_path, 0)[-1] == "start 2 0 1"
    assert "node 0 at 10.78.0.1:29500 " in done.stderr
    assert done.returncode == 0  # that of node 0


def test_fewer_nodes_than_the_least_do_not_begin(tmp_path: Path) -> None:
    config = LaunchConfig(
        nnodes=3,
        min_nodes=2,
        node_rank=0,
        master_port=free_port(),
        last_call=0.1,
        start_timeout=0.5,
        log_dir=tmp_path,
    )
    with pytest.raises(LaunchError, match=r"\bnodes 1, 2\b.*\b0\.5 s"):
        DistributedLauncher(config).launch(script(tmp_path, ""))
