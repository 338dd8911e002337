"""What `distlab.launch` is told: by its flags, by srun; and what it refuses."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from distlab.launch import LaunchConfig, LaunchError, rank_environment
from distlab.launch.arguments import HelpAsked, parse
from distlab.launch.config import LONGEST_S
from distlab.launch.inbox import Inbox
from distlab.launch.logs import Log
from distlab.launch.slurm import agent_settings, first_host

# ── configurations ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"nproc_per_node": 0}, "nproc_per_node is 0, must be at least 1"),
        ({"nproc_per_node": "4"}, "must be a whole number"),
        ({"nnodes": 2}, "say which node this is, with --node-rank 0 to 1"),
        ({"nnodes": 2, "node_rank": 2}, "with 2 nodes it is 0 to 1"),
        ({"node_rank": 1}, "node_rank is 1, but with 1 node it is 0"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"monitor_interval": 0}, "must be more than 0"),
        ({"grace_period": -1.0}, "must be at least 0"),
        ({"start_timeout": float("inf")}, "must be a number of seconds"),
        ({"start_timeout": 1e20}, "start_timeout is 1e+20 s, must be at most"),
        ({"monitor_interval": 10**400}, "must be at most 1000000000 s"),
        ({"join_grace": float("nan")}, "join_grace is nan, must be a number of"),
        ({"join_grace": float("inf")}, "join_grace is inf, must be a number of"),
        ({"join_grace": -1}, "join_grace is -1 s, must be at least 0"),
        ({"master_port": 70000}, "no port: 0 to 65535"),
        ({"backend": "mpi"}, "there are gloo, nccl, tcp"),
    ],
)
def test_a_configuration_that_cannot_be(config: dict[str, Any], words: str) -> None:
    with pytest.raises(LaunchError) as caught:
        LaunchConfig(**config)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_longest_wait_can_be_waited_for() -> None:
    LaunchConfig(monitor_interval=LONGEST_S, grace_period=0, join_grace=0)
    with contextlib.closing(Inbox()) as inbox:
        for wait in (inbox.wait, lambda s: inbox.wait_beside([], s)):
            inbox.wake()
            wait(LONGEST_S)


# ── logs ────────────────────────────────────────────────────────────────────────────


def test_last_lines_are_those_of_the_last_start(tmp_path: Path) -> None:
    log = Log(0, tmp_path)
    log.begin(1)
    os.write(log.descriptor, b"first\n\nhalf")
    assert log.last_lines(5) == ["first", "half"]
    log.begin(2)
    os.write(log.descriptor, b"a\nb\nc\n")
    assert log.last_lines(2) == ["b", "c"]
    assert log.path.read_text().splitlines() == [
        *("first", "", "half", "--- start 2 of this rank ---"),
        *("a", "b", "c"),
    ]
    log.close()


# ── the command line ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("said", "settings", "arguments"),
    [
        ("--nproc-per-node 4 s.py --max-restarts 1", {"nproc_per_node": 4}, 2),
        ("--nproc_per_node=4 s.py", {"nproc_per_node": 4}, 0),
        ("s.py --epochs 3 --max_restarts 2 x", {"max_restarts": 2}, 3),
        ("s.py --lr 1 -- --max-restarts 2", {}, 4),
        ("--monitor-interval 0.5 -- s.py --lr", {"monitor_interval": 0.5}, 1),
    ],
)
def test_flags(said: str, settings: dict[str, Any], arguments: int) -> None:
    line = parse(said.split())
    assert (line.settings, line.script) == (settings, "s.py")
    assert len(line.arguments) == arguments
    assert "--" not in line.arguments


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("", "no script is named"),
        ("--nproc-per-node", "has no value"),
        ("--nproc-per-nod 4 s.py", "did you mean --nproc-per-node?"),
        ("--nnodes two s.py", "--nnodes is 'two', must be a whole number"),
    ],
)
def test_flags_that_cannot_be(said: str, words: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse(said.split())
    assert words in str(caught.value)
    with pytest.raises(HelpAsked):
        parse(["--help"])


# ── srun ────────────────────────────────────────────────────────────────────────────

STEP = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


def test_an_agent_under_srun_needs_no_flags() -> None:
    settings = agent_settings(STEP)
    config = LaunchConfig(nproc_per_node=4, **settings)
    assert (config.nnodes, config.node_rank, config.world_size) == (2, 1, 8)
    assert (config.master_addr, config.master_port) == ("gpu007", 24567)
    one_node = {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}
    assert agent_settings({**STEP, **one_node}) == {}
    batch = {name: text for name, text in STEP.items() if "STEP" not in name}
    assert agent_settings(batch) == {}
    with pytest.raises(LaunchError, match="--ntasks-per-node=1"):
        agent_settings({**STEP, "SLURM_STEP_NUM_TASKS": "8"})


def test_a_rank_that_srun_started() -> None:
    assert rank_environment(STEP) == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": "24567",
    }
    given = {**STEP, "MASTER_PORT": "1"}
    assert "MASTER_PORT" not in rank_environment(given)
    assert rank_environment({**STEP, "RANK": "0"}) == {}
    assert rank_environment({}) == {}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[007-012,20],login", "gpu007"),
        ("a-1,a-2", "a-1"),
        ("rack[3]n", "rack3n"),
        ("one", "one"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
