"""`distlab.launch --standby` and `--elastic`, and `distlab.distributed.elastic`."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import distlab.distributed as dist
from distlab.comm import TorchComm
from distlab.comm.services import WakeAt
from distlab.distributed import elastic_training
from distlab.distributed.copies import Holdings, Label, plan_of, shared_of
from distlab.given.process_group import Begin, Finish, Interrupted
from distlab.given.recovery import Ended, Ready, Signal, Start
from distlab.launch import (
    LaunchConfig,
    LaunchError,
    control,
    launch_distributed_training,
)
from distlab.launch.elastic_decisions import (
    RANKS,
    Ask,
    ElasticDecisions,
    ElasticForm,
    Say,
    Waits,
)
from distlab.launch.forked import Exited, Forked
from distlab.launch.pages import Page
from tests.corpora import recovery_jobs as jobs
from tests.workbench.course import ROOT

# ── which state all ranks take ──────────────────────────────────────────────────────


def held(*labels: tuple[int, int], rank: int, size: int = 3) -> list[list[int]]:
    """A report: what `rank` of the group holds after these (step, generation)."""
    return [[step, generation, rank, size, 1] for step, generation in labels]


def test_the_newest_step_of_which_every_part_is_held() -> None:
    reports = [held((6, 1), (7, 1), rank=0), [], held((6, 1), (7, 1), rank=2)]
    plan = plan_of(reports)
    assert plan is not None
    # Rank 2 keeps a copy of what only rank 1 had.
    assert (plan.label, plan.lost) == (Label(7, 1), ())
    assert plan.owns == {0: 0, 1: 2, 2: 2}
    assert plan.complete == (0, 2)


def test_a_step_that_the_dead_rank_had_not_sent_is_not_taken() -> None:
    early, late = held((6, 1), (7, 1), rank=0), held((6, 1), (7, 1), rank=2)
    late[1][-1] = 0  # of step 7 rank 1's part has not arrived
    plan = plan_of([early, [], late])
    assert plan is not None
    assert (plan.label, plan.lost) == (Label(6, 1), ())


def test_a_rank_that_died_with_its_peer_is_named() -> None:
    plan = plan_of([held((7, 1), rank=0), [], []])
    assert plan is not None
    assert plan.label == Label(7, 1)
    assert plan.owns == {0: 0, 2: 0}
    assert plan.lost == (1,)


def test_copies_on_another_node_survive_the_loss_of_a_node() -> None:
    """Ranks 0 and 1 are on one node; ranks 2 and 3, on the other, are lost."""
    reports = [[[7, 1, rank, 4, 2]] for rank in (0, 1)]
    plan = plan_of([*reports, [], []])
    assert plan is not None
    assert (plan.owns, plan.lost) == ({0: 0, 1: 1, 2: 0, 3: 1}, ())


def test_a_process_without_a_state_is_no_source_and_two_of_them_hold_none() -> None:
    plan = plan_of([[], held((7, 1), (7, 2), rank=1, size=2)])
    assert plan is not None
    assert (plan.source, plan.label) == (1, Label(7, 2))
    assert plan_of([[], []]) is None
    # A Membership that names the newcomer throws the training away: see EL05.
    assert plan_of([[], held((7, 1), rank=1, size=2)], 0) is None


def test_copies_do_not_change_with_the_training_and_two_steps_are_kept() -> None:
    weights, holds = torch.zeros(3), Holdings()
    for step in (1, 2, 3):
        weights += 1
        holds.copy(Label(step, 1), 0, 1, {"weights": weights}, {"own": step})
    assert [row[0] for row in holds.report()] == [3, 2]
    slot = holds.find(Label(2, 1))
    assert slot is not None
    state = shared_of(slot)
    assert state["weights"].tolist() == [2, 2, 2]
    state["weights"] += 5  # an optimizer may keep what it loads
    assert shared_of(slot)["weights"].tolist() == [2, 2, 2]
    holds.forget_after(2)
    assert [row[0] for row in holds.report()] == [2]


# ── what cannot be ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"standby": -1}, r"^standby\b.*-1\b"),
        (
            {"standby": 1, "nnodes": 2, "min_nodes": 1, "node_rank": 0},
            "^standby .*nnodes.*1:2",
        ),
        ({"standby": 1, "backend": "tcp"}, "^standby .*gloo.*tcp$"),
        ({"elastic": "4"}, "^elastic .*'4'.*MIN:MAX"),
        ({"elastic": "3:2"}, "'3:2'.*MIN:MAX"),
        ({"elastic": "0:2"}, "'0:2'.*MIN:MAX"),
        ({"elastic": "1:2", "standby": 1}, "^standby .*elastic"),
        ({"elastic": "1:2", "nproc_per_node": 3}, "^elastic .*--nproc-per-node"),
        ({"elastic": "1:4", "global_batch_size": 3}, r"^global_batch_size\b.*\b4\b"),
    ],
)
def test_settings_that_exclude_each_other(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        LaunchConfig(**settings)


def test_a_state_that_cannot_be_kept_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dist.init_process_group("gloo", world_size=1, rank=0)
    try:
        with pytest.raises(ValueError, match=r'"model".*"optimizer"'):
            dist.elastic({"model": nn.Linear(1, 1)})
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = {"model": model, "optimizer": optimizer}
        with pytest.raises(ValueError, match=r"save_every.*folder"):
            dist.elastic(state, save_every=3)
        with monkeypatch.context() as patch:  # as under an agent, with 3.13's optimizer
            patch.setattr(elastic_training, "RegroupingComm", TorchComm)
            patch.setattr(optimizer, "state_by_name", dict, raising=False)
            with pytest.raises(ValueError, match="sharded"):
                dist.elastic(state)
        with pytest.raises(RuntimeError, match="`with step:`"):
            for _ in dist.elastic(state).steps(2):
                pass
        step = next(dist.elastic(state).steps(2))
        with pytest.raises(ZeroDivisionError), step:  # the user's mistake: no peer
            _ = 1 / 0
    finally:
        dist.destroy_process_group()


def test_a_sampler_before_the_rank_is_known_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distlab.distributed.sampler.has_rank", lambda: False)
    with pytest.raises(ValueError, match=r"--standby.*--elastic"):
        dist.DistributedSampler(dataset_size=8)
    assert len(dist.DistributedSampler(dataset_size=8, num_replicas=2, rank=1)) == 4


# ── the agent and its processes ─────────────────────────────────────────────────────


def test_a_process_joins_the_newest_round_only() -> None:
    ours, theirs = control.pair()
    with ours:
        member = control.Member(theirs)
        group = {"generation": 1, "rank": 0, "reports": [{"holds": []}], "log": "x"}
        group |= {"source": None, "grad_accum_steps": 1}
        group |= {"local_rank": 0, "local_size": 1, "shift": 1}
        for words in ({"regroup": 1}, {"regroup": 2}, {"go": 1, **group}):
            control.send(ours, words)
        while not member.must_regroup or member._regroup["regroup"] < 2:
            time.sleep(0.001)
        control.send(ours, {"go": 2, **group, "generation": 7})
        assert member.join(lambda: {"step": 5}).generation == 7
        assert control.receive(ours) == {"joined": 2, "step": 5}
        assert not member.must_regroup
    with pytest.raises(control.AgentGoneError):
        member.join(dict)


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
def test_the_agent_sees_what_a_trainer_does() -> None:
    page = Page.new()
    try:
        assert (page.step, page.doing) == (-1, "compute")
        with page.waiting(), page.waiting():
            assert page.doing == "wait"
        assert page.doing == "compute"
        before_s = time.monotonic()
        page.completed(3)
        assert page.step == 3
        assert before_s <= page.step_s <= time.monotonic()
    finally:
        page.close()


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
def test_an_environment_of_any_size_reaches_a_forked_process(tmp_path: Path) -> None:
    large = {f"LARGE_{number}": "x" * 100_000 for number in range(6)}
    (tmp_path / "says.py").write_text(
        "import os, sys\nsys.exit(sum(n.startswith('LARGE_') for n in os.environ))"
    )
    environment = {**os.environ, **large}
    processes, page = Forked([str(tmp_path / "says.py")], environment), Page.new()
    try:
        processes.wait()
        with (tmp_path / "log").open("wb") as log:
            processes.start(3, log.fileno(), page.descriptor, "")
        ends: list[object] = []
        while not any(isinstance(end, Exited) for end in ends):
            readable, _, _ = select.select(processes.sockets, [], [])
            ends += processes.take(readable)
        assert ends[-1] == Exited(3, len(large))
    finally:
        page.close()
        processes.close()


def elastic_to_three(folder: Path) -> ElasticDecisions:
    """Decisions of an elastic job in which processes 0, 1 and 2 train."""
    config = LaunchConfig(elastic="1:3", log_dir=folder, max_restarts=1)
    decisions = ElasticDecisions(config)
    assert decisions.on(Begin(), 0.0) == [Start(0), Start(1), Start(2)]
    for process in (0, 1):
        assert all(isinstance(a, WakeAt) for a in decisions.on(Ready(process), 1.0))
    *_, form = decisions.on(Ready(2), 1.0)
    assert form == ElasticForm(1, {0: 0, 1: 1, 2: 2}, 0, 1)
    return decisions


def test_a_death_makes_the_others_regroup_and_the_newest_step_is_taken(
    tmp_path: Path,
) -> None:
    decisions = elastic_to_three(tmp_path)
    actions = decisions.on(Ended(0, -9), 5.0)
    assert actions[:2] == [Start(3), Ask((1, 2), now=True)]
    decisions.on(Waits(1, 41), 5.1)
    decisions.on(Waits(2, 42), 5.1)
    *_, form = decisions.on(Ready(3), 5.2)
    assert form == ElasticForm(2, {0: 1, 1: 2, 2: 3}, 1, 1)
    # The only restart is used: the next death makes the group smaller.
    assert decisions.on(Ended(3, -9), 9.0)[0] == Ask((1, 2), now=True)


def test_when_all_members_have_ended_the_job_begins_anew(tmp_path: Path) -> None:
    config = LaunchConfig(elastic="1:2", log_dir=tmp_path, max_restarts=9)
    decisions = ElasticDecisions(config)
    decisions.on(Begin(), 0.0)
    decisions.on(Ready(0), 1.0)
    assert decisions.on(Ready(1), 1.0)[-1] == ElasticForm(1, {0: 0, 1: 1}, 0, 1)
    assert decisions.on(Ended(1, 1), 5.0)[:2] == [Start(2), Ask((0,), now=True)]
    decisions.on(Ready(2), 5.1)  # it has no state, and the only rank that has ends
    assert Start(3) in decisions.on(Ended(0, 1), 5.2)
    form = decisions.on(Ready(3), 5.3)[-1]
    assert form == ElasticForm(2, {0: 2, 1: 3}, 0, 1)
    # The generations go on: a rank of the first one is none of the third.
    assert Ask((3,), now=True) in decisions.on(Ended(2, 1), 6.0)
    decisions.on(Waits(3, 7), 6.1)
    form = decisions.on(Ready(4), 6.2)[-1]
    assert form == ElasticForm(3, {0: 3, 1: 4}, 0, 1)


def test_the_size_is_read_from_a_file(tmp_path: Path) -> None:
    decisions = elastic_to_three(tmp_path)
    for text in ("", "many", "0", "4", "3"):
        (tmp_path / RANKS).write_text(text)
        assert decisions.resize() == []
    (tmp_path / RANKS).write_text("1\n")
    said, *signals = decisions.resize()
    assert said == Say("1 rank is wanted; before it was 3")
    assert signals == [Signal(1, signal.SIGKILL), Signal(2, signal.SIGKILL)]
    assert decisions.resize() == []
    for process in (1, 2):  # they are not replaced, and are no failure
        assert Start(3) not in decisions.on(Ended(process, -9), 2.0)
    (tmp_path / RANKS).write_text("2")
    said = Say("2 ranks are wanted; before it was 1")
    assert decisions.resize() == [said, Start(3)]
    # A node of two ranks is lost with the room for them, and another one comes.
    assert decisions.resize(1) == []
    assert not any(isinstance(a, Start) for a in decisions.on(Ended(3, -9), 2.5))
    assert decisions.resize(3) == [Start(4)]  # two are wanted
    decisions.on(Interrupted(15), 3.0)
    decisions.on(Ended(0, 143), 3.1)
    assert decisions.on(Ended(4, 143), 3.1) == [Finish(143)]


# ── real processes ──────────────────────────────────────────────────────────────────


NUM_STEPS = 500


@pytest.fixture(scope="module")
def expected() -> str:
    """The weights after steps that nothing interrupts, as a digest."""
    with jobs.plain(NUM_STEPS) as job:
        return job.finish()


def are_replaced(job: jobs.Job, before: dict[int, int], ranks: Iterable[int]) -> bool:
    now = job.newest()
    return all(now[rank] != before[rank] for rank in ranks)


@pytest.mark.slow
def test_no_fault_costs_a_step_or_a_bit(expected: str) -> None:
    """One training: a death, two at once, a frozen rank, SIGTERM; and it goes on."""
    with jobs.ours(NUM_STEPS, flags=("--freeze-timeout", "2")) as job:
        (job.folder / "slow").write_text("0.04")  # so that there are steps enough
        (job.folder / "checkpoints").mkdir()
        kill = job.kill(0, needs_standby=True)
        assert kill.lost_steps == 0
        assert kill.stages["rank"] == 0
        said = kill.stages["lost_s"], kill.stages["completed_s"]
        assert kill.killed_s < said[0] < said[1]

        for ranks, number in (((1, 2), signal.SIGKILL), ((1,), signal.SIGSTOP)):
            job.wait_until(job.has_standby, "standby")
            before = job.newest()
            for rank in ranks:
                os.kill(before[rank], number)
            job.wait_until(partial(are_replaced, job, before, ranks), "new processes")
            job.wait_for_steps(5)
        job.process.terminate()
        assert job.process.wait(60) == 143
        said_text = (job.folder / "said.txt").read_text()
        assert re.search(r"rank 1\b.*SIGKILL", said_text)  # who was frozen
        steps = [int(p.stem[5:]) for p in (job.folder / "checkpoints").glob("*.json")]
        earlier = {pid for by in job.stamps().values() for pid in by}
        again = jobs.Job(job.folder, subprocess.Popen(job.process.args))
        assert again.finish() == expected
        firsts = {
            rows[0][0]
            for by in again.stamps().values()
            for pid, rows in by.items()
            if pid not in earlier
        }
    assert firsts == {max(steps) + 1}


def samples(folder: Path) -> Iterator[tuple[int, int, int, list[int]]]:
    """(step, world size, rank, sample ids) of each step that a process completed."""
    for path in folder.glob("ids.*"):
        for line in path.read_text().split("\n")[:-1]:
            step, size, rank, *ids = map(int, line.split())
            yield step, size, rank, ids


@pytest.mark.slow
def test_four_two_three_ranks_in_one_epoch_train_each_sample_once(
    tmp_path: Path,
) -> None:
    program = ROOT / "tests" / "workbench" / "elastic_training.py"
    command = [sys.executable, "-m", "distlab.launch", "--elastic", "2:4"]
    command += ["--log-dir", str(tmp_path), "--join-grace", "3", str(program)]
    sizes = []
    with subprocess.Popen([*command, str(tmp_path)], cwd=ROOT) as process:
        for size in (4, 2, 3):
            if sizes:
                (tmp_path / RANKS).write_text(str(size))
            until = time.monotonic() + 240
            while size not in {row[1] for row in samples(tmp_path)}:
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.05)
            sizes.append(size)
        (tmp_path / "fast").touch()
        assert process.wait(240) == 0
    rows = list(samples(tmp_path))
    size_of = {step: size for step, size, *_ in rows}
    num_steps, batch = 120, 12
    assert sorted(size_of) == list(range(num_steps))
    # On a busy machine the first group may begin before the fourth process is there.
    order = [size for size, _ in groupby(size_of[s] for s in range(num_steps))]
    assert order[order.index(4) :] == [4, 2, 3]
    seen = [i for step, size, rank, ids in rows for i in ids]
    # A rank that was killed may have completed its last step without writing it down.
    assert len(seen) == len(set(seen))
    missing = set(range(num_steps * batch)) - set(seen)
    shards = {(i // batch, i % batch % size_of[i // batch]) for i in missing}
    assert all(size_of[step] == 4 and rank in (2, 3) for step, rank in shards)
    assert len(shards) <= 2


def test_the_size_that_an_earlier_job_was_set_to_is_not_taken(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / RANKS).write_text("1")
    path = tmp_path / "plain.py"
    path.write_text('print("trained alone")\n')
    launch_distributed_training(path, elastic="1:2", log_dir=tmp_path)
    assert "wanted" not in capfd.readouterr().err
    assert not (tmp_path / RANKS).exists()


def test_a_script_that_joins_no_group_is_told_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plain.py"
    path.write_text('print("trained alone")\n')
    how = {"nproc_per_node": 2, "standby": 1, "log_dir": tmp_path}
    assert launch_distributed_training(path, **how) == 1
    said = capfd.readouterr().err
    assert "distlab.distributed.elastic" in said
    assert "    trained alone\n" in said
    assert "process_" not in said  # that log is gone
