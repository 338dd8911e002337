"""`distlab.launch` on several nodes, beside torchrun, and between namespaces."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
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
    LAST_WORDS,
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
def test_a_rank_killed_on_another_node_restarts_all_until_the_budget_is_spent(
    agents: Callable[..., list[Agent]], tmp_path: Path
) -> None:
    budget = ("--max-restarts", "1")
    both = agents(DIES, 9, flags=[budget, budget])
    said = outputs(both)
    assert [agent.returncode for agent in both] == [137, 137], said
    for rank in range(4):
        starts = [line for line in log(tmp_path, rank) if line.startswith("start ")]
        assert starts == ["start 1", "start 2"]
    deaths = [len(re.findall(r"rank 2\b.*SIGKILL", text)) for text in said]
    assert deaths == [2, 1]  # node 0 restarts; both say how it ended
    for text in said:
        last = text[text.index("rank_2.log") :].splitlines()
        assert "node 1" in last[0]
        assert last[1:3] == ["    start 2", f"    {LAST_WORDS}"]


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
        print("up", flush=True)
    time.sleep(600)
    """
    both = agents(program)
    assert both[0].stdout is not None
    assert re.match(r"\[distlab\] .*127\.0\.0\.1:\d+", both[0].stdout.readline())
    assert both[0].stdout.readline() == "[rank 0] up\n"
    both[1].kill()
    said = outputs(both)
    assert "node 1" in said[0]
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
    print("up", flush=True)
    time.sleep(600)
    """
    both = agents(program)
    assert both[1].stdout is not None
    assert both[1].stdout.readline().endswith("] up\n")
    both[0].kill()
    said = outputs(both)
    assert re.search(r"node 0\b.* 127\.0\.0\.1:\d+", said[1])
    assert both[1].returncode == 1
    for rank in range(4):
        assert ended(int((tmp_path / f"{rank}.pid").read_text()))


@pytest.mark.slow
def test_an_agent_is_refused_that_disagrees_or_is_there_already(
    agents: Callable[..., list[Agent]], tmp_path: Path
) -> None:
    as_node_1, three_ranks = ("--node-rank", "1"), ("--nproc-per-node", "3")
    program = "say_pid()\nwait_for('end')\n"
    node_0, *others = agents(program, flags=[(), three_ranks, as_node_1, as_node_1])
    while not all((tmp_path / f"{rank}.pid").exists() for rank in range(4)):
        assert node_0.poll() is None
        time.sleep(0.05)
    while sum(agent.poll() is not None for agent in others) < 2:
        time.sleep(0.05)
    refused = [agent for agent in others if agent.poll() is not None]
    (tmp_path / "end").touch()
    outputs([node_0, *others])
    assert [
        agent.returncode for agent in (node_0, *others) if agent not in refused
    ] == [*(0, 0)]
    assert [agent.returncode for agent in refused] == [2, 2]
    assert others[0] in refused


def test_start_timeout(tmp_path: Path) -> None:
    path = script(tmp_path, "")
    common = {"nnodes": 2, "master_port": free_port(), "log_dir": tmp_path}
    for node, timeout_s, words in (
        (0, 1.5, r"\bnode 1\b.*\b1\.5 s"),
        (1, 0.4, r"\bnode 0\b.*127\.0\.0\.1:\d+.*\b0\.4 s"),
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
    assert said.startswith("process_group.rendezvous ")
    assert "KeyError: 7" in said
    assert said.endswith(" distlab use reference process_group.rendezvous")


# ── beside torchrun ─────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_the_trainer_ends_with_the_same_bits_under_torchrun_and_under_ours(
    tmp_path: Path,
) -> None:
    # The group's threads would want the interpreter's lock while the program ends.
    program = f"""
    import runpy
    runpy.run_path({str(TRAINER)!r}, run_name="__main__")
    tasks = pathlib.Path("/proc/self/task").glob("*/comm")
    (here / f"left.{{rank}}").write_text("".join(path.read_text() for path in tasks))
    """
    weights = {}
    ours = [sys.executable, "-m", "distlab.launch", "--nproc-per-node", "2"]
    ours += ["--log-dir", str(tmp_path / "ours")]
    for name, launcher in {"ours": ours, "torchrun": torchrun(tmp_path, 2)}.items():
        folder = tmp_path / name
        folder.mkdir()
        done = subprocess.run(
            [*launcher, str(script(folder, program))],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        weights[name] = torch.load(folder / "weights.pt")
        left = [(folder / f"left.{rank}").read_text() for rank in (0, 1)]
        assert not any("pt_gloo" in names for names in left)
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
if rank == 1 and generation == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)
print("and", total.item(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torch_meets_again_after_a_rank_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, textwrap.dedent(MEETS))
    config = LaunchConfig(nproc_per_node=2, max_restarts=1, log_dir=tmp_path)
    assert DistributedLauncher(config).launch(path) == 0
    for rank in range(2):
        assert log(tmp_path, rank)[-2:] == ["sum 3.0", "and 6.0"]
    first, between = log(tmp_path, 1)[:2]
    assert first == "sum 3.0"
    assert " 2 " in between
    assert "MASTER_PORT" not in capsys.readouterr().err  # the store was used


# ── distlab doctor --ranks ──────────────────────────────────────────────────────────


@pytest.mark.slow
def test_doctor_has_five_findings_about_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor_of_ranks(2, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    assert found[0]["name"] == "2 ranks"
    assert [one["state"] for one in found] == ["ok"] * 5


def test_doctor_says_that_ranks_do_not_talk(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = check_ranks(4, launch=lambda *given, **config: 7)
    assert (found.name, found.state) == ("4 ranks", "broken")
    assert re.search(r"\b7\b", found.figure)


@pytest.mark.parametrize("num_ranks", [-1, 0, 65, 10_000])
def test_doctor_starts_only_as_many_ranks_as_there_can_be(num_ranks: int) -> None:
    def launch(*given: object, **config: object) -> int:
        raise AssertionError("ranks were started")

    with pytest.raises(ValueError, match=rf"--ranks {num_ranks}\b.*\b64\b"):
        list(check_ranks(num_ranks, launch=launch))


# ── make nodes ──────────────────────────────────────────────────────────────────────


def test_where_a_tool_is_missing_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        bench.shutil, "which", lambda tool: None if tool == "tc" else ""
    )
    report = bench.measure()
    assert report["results"] == []
    if sys.platform.startswith("linux"):
        assert re.search(r" tc .*iproute2", report["skipped"])
    assert bench.reason(report)


def test_what_the_system_refuses_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for tool in bench.TOOLS:
        path = tmp_path / tool
        path.write_text("#!/bin/sh\necho no $1 for you >&2\nexit 1\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(bench.sys, "platform", "linux")
    said = bench.measure()["skipped"]
    assert said.startswith("unshare --user --net: ")
    assert said.endswith(" --user for you")
    said = bench.measure(inside=True)["skipped"]
    assert said.startswith("ip link add bridge0 ")
    assert "no link for you" in said
