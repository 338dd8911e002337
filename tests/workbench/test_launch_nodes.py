"""`distlab.launch` on several nodes, beside torchrun, and between namespaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import nodes as bench
from distlab.cli.doctor_ranks import check_ranks, doctor_of_ranks
from distlab.launch import DistributedLauncher, LaunchConfig, LaunchError
from distlab.launch.decisions import DecisionError
from tests.workbench.course import ROOT
from tests.workbench.judging import UNITS
from tests.workbench.launching import (
    DIES,
    Agent,
    ended,
    free_port,
    linux,
    log,
    outputs,
    script,
    torchrun,
)
from tests.workbench.test_launch import mine

TRAINER = UNITS["trainer"].solution(ROOT)
# ── two agents on one machine ───────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_rank_killed_on_another_node_restarts_all(
    agents: Callable[..., list[Agent]], tmp_path: Path
) -> None:
    budget = ("--max-restarts", "1")
    both = agents(DIES, 1, flags=[budget, budget])
    said = outputs(both)
    assert [agent.returncode for agent in both] == [0, 0], said
    for rank in range(4):
        assert log(tmp_path, rank)[0] == "start 1"
        assert log(tmp_path, rank)[-1] == "start 2"
    assert "rank 2 was ended by SIGKILL" in said[0]


@pytest.mark.slow
def test_past_the_budget_both_agents_report_and_end_with_one_code(
    agents: Callable[..., list[Agent]], tmp_path: Path
) -> None:
    both = agents(DIES, 9)
    said = outputs(both)
    assert [agent.returncode for agent in both] == [137, 137], said
    for text in said:
        assert "gave up: rank 2 was ended by SIGKILL" in text
        assert "rank_2.log on node 1 (" in text
        assert "    about to die\n" in text


@linux
@pytest.mark.slow
def test_a_killed_agent_takes_its_ranks_along_and_the_others_are_stopped(
    agents: Callable[..., list[Agent]], tmp_path: Path
) -> None:
    program = """
    say_pid()
    if rank == 0:
        for other in (1, 2, 3):
            wait_for(f"{other}.pid")
        print("all are up", flush=True)
    time.sleep(600)
    """
    both = agents(program)
    assert both[0].stdout is not None
    assert both[0].stdout.readline().startswith("[distlab] waits at 127.0.0.1:")
    assert both[0].stdout.readline() == "[rank 0] all are up\n"
    both[1].kill()
    said = outputs(both)
    assert "node 1 is gone, and its ranks with it" in said[0]
    assert both[0].returncode == 128 + signal.SIGKILL
    for rank in range(4):
        assert ended(int((tmp_path / f"{rank}.pid").read_text()))


@linux
@pytest.mark.slow
def test_without_node_0_an_agent_stops_its_ranks(
    agents: Callable[..., list[Agent]], tmp_path: Path
) -> None:
    program = """
    say_pid()
    for other in (0, 1, 2, 3):
        wait_for(f"{other}.pid")
    print("all are up", flush=True)
    time.sleep(600)
    """
    both = agents(program)
    assert both[1].stdout is not None
    assert "all are up" in both[1].stdout.readline()
    both[0].kill()
    said = outputs(both)
    assert "node 0 at 127.0.0.1" in said[1]
    assert "does not answer" in said[1]
    assert both[1].returncode == 1
    for rank in range(4):
        assert ended(int((tmp_path / f"{rank}.pid").read_text()))


@pytest.mark.slow
def test_agents_that_do_not_agree(agents: Callable[..., list[Agent]]) -> None:
    short = ("--start-timeout", "20")
    both = agents("", flags=[short, ("--nproc-per-node", "3")])
    said = outputs(both)
    assert "nproc_per_node is 3 on node 1, but 2 on node 0" in said[1]
    assert [agent.returncode for agent in both] == [2, 2]
    assert "no agent of node 1 came within 20 s" in said[0]


@pytest.mark.slow
def test_two_agents_cannot_be_one_node(agents: Callable[..., list[Agent]]) -> None:
    three = agents("", flags=[(), (), ("--node-rank", "1")])
    said = outputs(three)
    refused = [text for text in said if "each node needs its own" in text]
    assert len(refused) == 1
    assert sorted(agent.returncode for agent in three) == [0, 0, 2]


def test_start_timeout(tmp_path: Path) -> None:
    path = script(tmp_path, "")
    common = {"nnodes": 2, "master_port": free_port(), "log_dir": tmp_path}
    for node, timeout_s, words in (
        (0, 0.3, "no agent of node 1 came within 0.3 s"),
        (1, 0.4, "no agent of node 0 at 127.0.0.1:[0-9]+ within 0.4 s"),
    ):
        config = LaunchConfig(node_rank=node, start_timeout=timeout_s, **common)  # type: ignore[arg-type]
        with pytest.raises(LaunchError, match=words):
            DistributedLauncher(config).launch(path)


def test_a_mistake_in_the_rendezvous_is_one_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine(monkeypatch, "key, values = request.key, self.values", "raise KeyError(7)")
    config = LaunchConfig(
        nnodes=2, node_rank=0, master_port=free_port(), log_dir=tmp_path
    )
    with pytest.raises(DecisionError) as caught:
        DistributedLauncher(config).launch(script(tmp_path, ""))
    said = str(caught.value)
    assert said.startswith("process_group.rendezvous (yours): ")
    assert "KeyError: 7" in said
    assert said.endswith("; past it: distlab use reference process_group.rendezvous")


# ── beside torchrun ─────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_the_trainer_ends_with_the_same_bits_under_torchrun_and_under_ours(
    tmp_path: Path,
) -> None:
    weights = {}
    ours = [sys.executable, "-m", "distlab.launch", "--nproc-per-node", "2"]
    for name, launcher in {"ours": ours, "torchrun": torchrun(tmp_path, 2)}.items():
        folder = tmp_path / name
        folder.mkdir()
        done = subprocess.run(
            [*launcher, str(TRAINER)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        weights[name] = torch.load(folder / "weights.pt")
    assert weights["ours"].keys() == weights["torchrun"].keys()
    for name, tensor in weights["ours"].items():
        assert torch.equal(tensor, weights["torchrun"][name])
    assert "accuracy" in (tmp_path / "ours" / "rank_0.log").read_text()


MEETS = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(rank + 1)])
dist.all_reduce(total)
print("sum", total.item(), flush=True)
if rank == 2 and generation == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)
print("and", total.item(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torch_meets_again_after_one_of_four_ranks_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, textwrap.dedent(MEETS))
    config = LaunchConfig(nproc_per_node=4, max_restarts=1, log_dir=tmp_path)
    assert DistributedLauncher(config).launch(path) == 0
    for rank in range(4):
        assert log(tmp_path, rank)[-2:] == ["sum 10.0", "and 40.0"]
    assert log(tmp_path, 2)[:2] == ["sum 10.0", "--- start 2 of this rank ---"]
    assert "separate runs" not in capsys.readouterr().err


# ── distlab doctor --ranks ──────────────────────────────────────────────────────────


@pytest.mark.slow
def test_doctor_tries_ranks_in_five_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor_of_ranks(3) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("3 ranks     ok      met in ")
    assert all(line.split("  ")[0] and " ok " in line for line in lines)
    assert "exit code 0, nothing is left" in lines[-1]


def test_doctor_says_that_ranks_do_not_talk(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = check_ranks(4, launch=lambda *given, **config: 7)
    assert (found.name, found.state, found.figure) == (
        "4 ranks",
        "broken",
        "exit code 7",
    )


@pytest.mark.parametrize("num_ranks", [-1, 0, 65, 10_000])
def test_doctor_starts_only_as_many_ranks_as_there_can_be(num_ranks: int) -> None:
    def launch(*given: object, **config: object) -> int:
        raise AssertionError("ranks were started")

    with pytest.raises(ValueError, match=f"^--ranks {num_ranks}: choose between 1 and"):
        list(check_ranks(num_ranks, launch=launch))


# ── make nodes ──────────────────────────────────────────────────────────────────────


def test_where_a_tool_is_missing_it_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        bench.shutil, "which", lambda tool: None if tool == "tc" else ""
    )
    assert bench.main([]) == 0
    said = capsys.readouterr().out
    if sys.platform.startswith("linux"):
        assert said == "skipped: there is no program tc (package iproute2)\n"
    assert bench.main(["--json"]) == 0
    assert "skipped" in json.loads(capsys.readouterr().out)


def test_what_the_system_refuses_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for tool in bench.TOOLS:
        path = tmp_path / tool
        path.write_text("#!/bin/sh\necho no $1 for you >&2\nexit 1\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(bench.sys, "platform", "linux")
    assert bench.main([]) == 0
    assert (
        capsys.readouterr().out == "skipped: unshare --user --net: no --user for you\n"
    )
    assert bench.main([bench.INSIDE]) == 0
    said = capsys.readouterr().out
    assert said.startswith("skipped: ip link add bridge0 type bridge: no link for you")
