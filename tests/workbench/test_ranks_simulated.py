"""Simulated ranks end as real ones do, and a program can't take the workbench along.

The same programs run on both sides; see also DISTLAB_RANKS=simulated distlab mutants.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distlab.curriculum import load_curriculum
from distlab.grading.grade import Grader
from distlab.grading.mutants import judge
from distlab.grading.preflight import look_at
from distlab.processes.tree import descendants
from distlab.ranks import new_cluster
from distlab.ranks.simulated import NotHereError, SimulatedCluster
from distlab.runner import Cluster, Limits, Run, RunnerError
from distlab.runner.kind import VARIABLE, ranks_kind
from tests.workbench.conformance import misbehaviour as programs
from tests.workbench.course import ROOT
from tests.workbench.test_runner_processes import eventually

ON_REAL_RANKS_ONLY = 11  # of the course's 90 tasks


@pytest.fixture(scope="module")
def simulated() -> Iterator[Cluster]:
    """Simulated ranks for everybody."""
    with SimulatedCluster(preload=(programs.__name__,)) as cluster:
        yield cluster


def ends(run: Run) -> list[Any]:
    """What must be the same on both sides."""
    # How long a rank had waited is the one thing that differs.
    errors = [r.error and (r.error.type, r.error.message[:20]) for r in run.ranks]
    calls = [[(e["k"], e.get("op")) for e in r.journal] for r in run.ranks]
    status = [(record.status, record.exit_status) for record in run.ranks]
    return [run.outcome, status, run.values, errors, calls, run.cycle]


@pytest.mark.parametrize(
    "called",
    [
        (programs.hello,),
        (programs.give_back, (1, 2), {3: "x"}),
        (programs.one_raises,),
        (programs.all_raise,),
        (programs.leaves, 3),
        (programs.exits_politely,),
        (programs.ring_of_sends,),
        (programs.skips_the_barrier,),
        (programs.kills_itself, "SIGKILL"),
    ],
    ids=lambda called: str(called[0].__name__),
)
def test_a_run_ends_as_on_real_ranks(
    cluster: Cluster, simulated: Cluster, called: tuple[Any, ...]
) -> None:
    program, *args = called
    assert ends(simulated.run(program, 2, *args)) == ends(
        cluster.run(program, 2, *args)
    )


def test_ranks_have_their_own_folders_and_numbers(simulated: Cluster) -> None:
    folders = simulated.run(programs.own_folder, 2).require_finished().values
    assert len(set(folders)) == 2
    numbers = simulated.run(programs.random_numbers, 2, seed=3).require_finished()
    assert numbers.values[0] != numbers.values[1]
    again = simulated.run(programs.random_numbers, 2, seed=3)
    assert again.values == numbers.values


def test_a_loop_is_broken_off_and_shown(simulated: Cluster) -> None:
    run = simulated.run(programs.loops, 2, limits=Limits(seconds=0.5))
    assert run.outcome == "timeout"
    assert [record.status for record in run.ranks] == ["waiting", "running"]
    assert any(file.endswith("misbehaviour.py") for file, _ in run.ranks[1].stack)
    assert simulated.run(programs.hello, 2).outcome == "finished"


def test_a_crash_ends_the_worker_alone(simulated: Cluster) -> None:
    ways = {1: programs.crashes, 0: programs.crashes_after_a_pause}
    for crashed, program in ways.items():
        run = simulated.run(program, 2)
        died = [record for record in run.ranks if record.status == "died"]
        assert (run.outcome, [record.rank for record in died]) == ("died", [crashed])
        assert died[0].exit_status == signal.SIGSEGV
        assert any(file.endswith("misbehaviour.py") for file, _ in died[0].stack)
    assert simulated.run(programs.hello, 2).outcome == "finished"


def test_a_worker_that_cannot_start_says_why() -> None:
    with (
        SimulatedCluster(preload=("no_such_module",)) as cluster,
        pytest.raises(RunnerError, match="'no_such_module'"),
    ):
        cluster.run(programs.hello, 1)


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def test_what_a_rank_forked_ends_with_the_worker() -> None:
    cluster = SimulatedCluster()
    with cluster:
        run = cluster.run(programs.leaves_a_child_and_dies, 2)
        assert run.outcome == "died"
        worker = cluster._worker
        assert worker is not None
    group = worker._process.pid
    # It has been killed, but a busy machine takes a while to end it.
    assert eventually(
        lambda: not [pid for pid in descendants(1) if session_of(pid) == group]
    )


LOOPS = """
from distlab.ranks.simulated import SimulatedCluster
from distlab.runner import Limits
from tests.workbench.conformance import misbehaviour as programs

with SimulatedCluster(preload=(programs.__name__,)) as cluster:
    cluster.start()
    print(cluster._worker.folder, flush=True)
    cluster.run(programs.loops, 2, limits=Limits(seconds=600))
"""


@pytest.mark.slow
def test_a_loop_ends_when_the_parent_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", LOOPS],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    folder = Path(parent.stdout.readline().strip())
    assert eventually((folder / "ranks" / "rank1").is_dir)
    parent.kill()
    parent.communicate()
    assert eventually(lambda: not list(tmp_path.iterdir()))


def test_what_needs_a_process_is_refused(simulated: Cluster) -> None:
    with pytest.raises(NotHereError):
        simulated.run(programs.hello, 2, may_die=(1,))


def test_the_environment_chooses_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert ranks_kind() == "real"
    monkeypatch.setenv(VARIABLE, "simulated")
    with new_cluster() as cluster:
        assert isinstance(cluster, SimulatedCluster)
    monkeypatch.setenv(VARIABLE, "imagined")
    with pytest.raises(ValueError, match=r"\bimagined\b"):
        new_cluster()


# ── verdicts ────────────────────────────────────────────────────────────────────────


def test_a_verdict_is_the_same(
    simulated: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One right and one wrong solution; the whole catalogue: distlab mutants."""
    from distlab.grading.catalogue import read_catalogue

    monkeypatch.setenv(VARIABLE, "simulated")
    curriculum = load_curriculum()
    task = curriculum.task("1.1")
    report = Grader(curriculum, simulated, code="reference", seed=0).grade([task])
    assert (report.tasks[0].message, report.exit_code) == ("", 0)
    wrong = [entry for entry in read_catalogue(curriculum) if entry.id == "CO01"]
    assert [found.is_right for found in judge(curriculum, simulated, wrong)] == [True]


def test_tasks_that_need_processes_are_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    curriculum = load_curriculum()
    others = [task for task in curriculum.tasks if task.processes]
    assert len(others) == ON_REAL_RANKS_ONLY
    monkeypatch.setenv(VARIABLE, "simulated")
    verdict, ready = look_at(curriculum, others[0], "reference")
    assert (verdict.status, ready) == ("not_judged", None)
    monkeypatch.setenv(VARIABLE, "real")
    assert look_at(curriculum, others[0], "reference")[1] is not None
