"""Spawned ranks, for systems that can't fork: each is a process of its own.

tests/portable judges tasks on them where nothing that only Unix has can be used.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distlab.ranks import new_cluster
from distlab.ranks.apart import NotHereError
from distlab.ranks.spawned import SpawnedCluster
from distlab.runner import Cluster, Limits, RunnerError
from distlab.runner.kind import VARIABLE
from tests.workbench.conformance import misbehaviour as programs
from tests.workbench.course import ROOT
from tests.workbench.test_ranks_simulated import ends
from tests.workbench.test_runner_processes import eventually

STARTS = """
import json, os, sys, time
from distlab.ranks.spawned import SpawnedCluster
from tests.workbench.conformance import misbehaviour as programs

def tell(cluster):
    pids = [one.process.pid for one in cluster._warm]
    print(json.dumps([pids, str(cluster._home)]), flush=True)

with SpawnedCluster() as cluster:
    if sys.argv[1] == "starting":
        cluster.start(wait=False)
        tell(cluster)
        time.sleep(60)
    cluster.start()
    tell(cluster)
    cluster.run(programs.loops, 2)
"""


@pytest.fixture(scope="module")
def spawned() -> Iterator[Cluster]:
    with SpawnedCluster(preload=(programs.__name__,)) as cluster:
        yield cluster


def test_a_run_has_processes_of_its_own(
    spawned: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "spawned")
    with new_cluster() as other:
        assert isinstance(other, SpawnedCluster)  # it starts nothing yet
    run = spawned.run(programs.everything_plain, 2).require_finished()
    assert len({record.pid for record in run.ranks} | {os.getpid()}) == 3
    assert [value["rank"] for value in run.values] == [0, 1]
    assert [record.marks for record in run.ranks] == [[0, 0, 0]] * 2
    assert all(f"out of {n}: äöü" in run.ranks[n].output for n in (0, 1))
    with pytest.raises(NotHereError):
        spawned.run(programs.hello, 2, may_die=(1,))


@pytest.mark.slow
@pytest.mark.parametrize(
    "called",
    [
        (programs.give_back, (1, 2), {3: "x"}),
        (programs.one_raises,),
        (programs.leaves, 3),
        (programs.exits_politely,),
        (programs.ring_of_sends,),
        (programs.kills_itself, "SIGKILL"),
        (programs.too_small_a_box,),
    ],
    ids=lambda called: str(called[0].__name__),
)
def test_a_run_ends_as_on_forked_ranks(
    cluster: Cluster, spawned: Cluster, called: tuple[Any, ...]
) -> None:
    program, *args = called
    assert ends(spawned.run(program, 2, *args)) == ends(cluster.run(program, 2, *args))


@pytest.mark.slow
def test_a_loop_is_ended_and_shown(spawned: Cluster) -> None:
    run = spawned.run(programs.loops, 2, limits=Limits(seconds=1))
    assert run.outcome == "timeout"
    assert any(file.endswith("misbehaviour.py") for file, _ in run.ranks[1].stack)


@pytest.mark.slow
def test_a_process_that_cannot_start_says_why() -> None:
    with (
        SpawnedCluster(preload=("no_such_module",)) as cluster,
        pytest.raises(RunnerError, match="'no_such_module'"),
    ):
        cluster.run(programs.hello, 1)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["starting", "running"])
def test_nothing_is_left_when_the_parent_is_killed(tmp_path: Path, moment: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTS, moment],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pids, home = json.loads(parent.stdout.readline())
    if moment == "running":
        assert eventually((Path(home) / "run1" / "rank1").is_dir)
    parent.kill()
    parent.communicate()
    assert eventually(lambda: not any(_is_ours(pid, home) for pid in pids))
    assert list(tmp_path.iterdir()) == []


def _is_ours(pid: int, home: str) -> bool:
    try:
        return home.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
