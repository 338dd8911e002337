"""What `distlab.launch` is told: by its flags, by srun; and what it refuses."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from distlab.launch import LaunchConfig, LaunchError, rank_environment
from distlab.launch.arguments import HelpAsked, parse
from distlab.launch.config import LONGEST_S
from distlab.launch.expectations import expect_program
from distlab.launch.inbox import Inbox
from distlab.launch.logs import RankLog
from distlab.launch.slurm import agent_settings, first_host
from distlab.launch.stores import is_own, listen
from tests.workbench.golden import Golden
from tests.workbench.launching import START

# ── configurations ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"nproc_per_node": 0}, r"nproc_per_node\b.*\b0\b.*\b1\b"),
        ({"nproc_per_node": "4"}, r"nproc_per_node\b.*'4'"),
        ({"nnodes": 2}, r"nnodes\b.*\b2\b.*--node-rank\b.*\b0\b.*\b1\b"),
        ({"nnodes": 2, "node_rank": 2}, r"node_rank\b.*\b2\b.*\b0 to 1\b"),
        ({"node_rank": 1}, r"node_rank\b.*\b1\b.*\b0$"),
        ({"max_restarts": -1}, r"max_restarts\b.*-1\b"),
        ({"monitor_interval": 0}, r"monitor_interval\b.*\b0 s\b"),
        ({"grace_period": -1.0}, r"grace_period\b.*-1\.0 s\b"),
        ({"node_timeout": 0}, r"node_timeout\b.*\b0 s\b"),
        ({"start_timeout": float("inf")}, r"start_timeout\b.*\binf\b"),
        ({"start_timeout": 1e20}, r"start_timeout\b.*1e\+20 s.*\b1000000000 s"),
        ({"monitor_interval": 10**400}, r"monitor_interval\b.*\b1000000000 s"),
        ({"join_grace": float("nan")}, r"join_grace\b.*\bnan\b"),
        ({"join_grace": float("inf")}, r"join_grace\b.*\binf\b"),
        ({"join_grace": -1}, r"join_grace\b.*-1 s\b"),
        ({"master_port": 70000}, r"master_port\b.*\b70000\b.*\b0 to 65535"),
        ({"backend": "mpi"}, r"backend\b.*'mpi'.*\bgloo, nccl, tcp$"),
    ],
)
def test_a_configuration_that_cannot_be(config: dict[str, Any], words: str) -> None:
    with pytest.raises(LaunchError, match=words) as caught:
        LaunchConfig(**config)
    assert "\n" not in str(caught.value)


def test_what_is_said_of_settings_that_cannot_be(golden: Golden) -> None:
    wrong: tuple[dict[str, Any], ...] = (
        {"nproc_per_node": 0},
        {"nproc_per_node": "4"},
        {"nnodes": 2},
        {"nnodes": 2, "node_rank": 2},
        {"grace_period": -1},
        {"monitor_interval": 0},
        {"join_grace": "1"},
        {"last_call": 1e20},
        {"master_port": 70000},
        {"backend": "mpi"},
        {"nnodes": 2, "min_nodes": 3, "node_rank": 0},
        {"standby": 1, "nnodes": 2, "min_nodes": 1, "node_rank": 0},
        {"standby": 1, "backend": "tcp"},
        {"elastic": "3:2"},
        {"elastic": "1:2", "standby": 1},
        {"elastic": "1:2", "nproc_per_node": 3},
        {"elastic": "1:4", "global_batch_size": 3},
    )
    said = []
    for config in wrong:
        with pytest.raises(LaunchError) as caught:
            LaunchConfig(**config)
        said.append(str(caught.value))
    for line in (
        "",
        "--nproc-per-node",
        "--nproc-per-mode 4 s.py",
        "--nnodes two s.py",
    ):
        with pytest.raises(LaunchError) as caught:
            parse(line.split())
        said.append(str(caught.value))
    golden("launch/refused", "\n".join(said))


def test_the_longest_wait_can_be_waited_for() -> None:
    LaunchConfig(monitor_interval=LONGEST_S, grace_period=0, join_grace=0)
    with contextlib.closing(Inbox()) as inbox:
        for wait in (inbox.wait, lambda s: inbox.wait_beside([], s)):
            inbox.wake()
            wait(LONGEST_S)


# ── logs ────────────────────────────────────────────────────────────────────────────


def test_last_lines_are_those_of_the_last_start(tmp_path: Path) -> None:
    log = RankLog(0, tmp_path)
    log.begin(1)
    os.write(log.descriptor, b"first\n\nhalf")
    assert log.last_lines(5) == ["first", "half"]
    log.begin(2)
    os.write(log.descriptor, b"a\nb\nc\n")
    assert log.last_lines(2) == ["b", "c"]
    assert log.path.read_text().splitlines() == [
        *("first", "", "half", START.format(2)),
        *("a", "b", "c"),
    ]
    log.close()


# ── the command line ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("said", "settings", "arguments"),
    [
        ("--nproc-per-node 4 s.py --max-restarts 1", {"nproc_per_node": 4}, 2),
        ("--nproc_per_node=4 s.py", {"nproc_per_node": 4}, 0),
        ("--nproc-per 4 s.py", {"nproc_per_node": 4}, 0),
        ("s.py --epochs 3 --max_restarts 2 x", {}, 5),
        ("s.py --lr 1 -- --max-restarts 2", {}, 5),
        ("-- s.py --backend nccl", {}, 2),
        ("--monitor-interval 0.5 -- s.py --lr", {"monitor_interval": 0.5}, 1),
    ],
)
def test_flags(said: str, settings: dict[str, Any], arguments: int) -> None:
    line = parse(said.split())
    assert (line.settings, line.script) == (settings, "s.py")
    assert len(line.arguments) == arguments


def test_a_launchers_flag_after_the_script_is_the_scripts_and_is_noticed() -> None:
    assert parse(["s.py", "--nproc-per-node=4"]).misplaced == "--nproc-per-node"
    assert parse(["--max-restarts", "1", "s.py", "--nnodes", "2"]).misplaced == ""
    assert parse(["s.py", "--backend", "nccl"]).misplaced == ""


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("", "script.py"),
        ("--nproc-per-node", "--nproc-per-node"),
        ("--nproc-per-mode 4 s.py", "--nproc-per-node?"),
        ("--nnodes two s.py", "'two'"),
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


# ── ports and scripts ───────────────────────────────────────────────────────────────


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_is_opened_on_either_family_and_one_in_use_is_named(host: str) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    assert is_own(host)
    with contextlib.closing(listen(host, 0)) as listener:
        address, port, *_ = listener.getsockname()
        assert address == host
        socket.create_connection((host, port), timeout=10).close()
        with pytest.raises(LaunchError, match=rf"\b{port}\b.*--master-port") as caught:
            listen(host, port)
    assert "\n" not in str(caught.value)


def test_without_an_address_a_port_is_opened_on_all_of_this_nodes() -> None:
    with contextlib.closing(listen("", 0)) as listener:
        port = listener.getsockname()[1]
        for host in ["127.0.0.1", *["::1"] * has_ipv6()]:
            socket.create_connection((host, port), timeout=10).close()


def test_a_script_that_cannot_be_read_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    for run_as in ("script", "path"):
        with pytest.raises(LaunchError, match=r"train\.py"):
            expect_program(str(script), run_as)
    script.touch()
    expect_program(str(script), "script")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read anything
    with pytest.raises(LaunchError, match=r"train\.py.*permission"):
        expect_program(str(script), "script")
