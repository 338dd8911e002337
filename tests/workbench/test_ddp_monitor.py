"""`distlab ddp --monitor`, `--save`, `--profile`, `--hang-after`, and `distlab top`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from distlab.grading.kit.values import digest
from distlab.monitor.jsonl import read_folder
from distlab.runner import Cluster, Limits, NotFinishedError, RankContext
from distlab.runner.autopsy import evidence
from tests.workbench.course import Course

SOON = Limits(seconds=60.0, idle_s=1.0)


@pytest.fixture
def course(tmp_path: Path) -> Course:
    return Course(tmp_path)


def sleeps_on_rank_1(context: RankContext) -> None:
    if context.comm.rank == 1:
        time.sleep(60.0)
    context.comm.barrier()


def sleeps_while_others_wait(context: RankContext) -> None:
    context.comm.barrier()
    context.comm.all_reduce(torch.ones(1))
    if context.comm.rank == 1:
        time.sleep(60.0)
    context.comm.isend(torch.ones(1), 1).wait() if context.comm.rank else None
    context.comm.all_reduce(torch.ones(1))


def goes_on(context: RankContext) -> None:
    for step in range(10**6):
        context.report(os.getpid())
        context.comm.all_reduce(torch.ones(1))
        time.sleep(0.01 if step else 0.0)


def speaks_for_a_while(context: RankContext) -> str:
    for _ in range(6):
        time.sleep(0.3)
        context.report("still here")
    return "done"


def test_a_run_in_which_no_rank_does_anything_is_ended(cluster: Cluster) -> None:
    run = cluster.run(sleeps_on_rank_1, 3, limits=SOON)
    assert run.outcome == "timeout"
    assert run.idle_s >= 1.0
    assert re.match(
        r"no rank did anything for \d\.\d s: rank 1 had not finished; rank 1 was at "
        r"\S*test_ddp_monitor\.py:\d+",
        run.explanation,
    )
    with pytest.raises(NotFinishedError) as refused:
        run.require_finished()
    assert refused.value.run is run


def test_a_stopped_rank_is_named_though_it_waits_in_a_call(cluster: Cluster) -> None:
    def stop(rank: int, pid: int) -> None:
        if rank == 2:
            os.kill(pid, signal.SIGSTOP)

    run = cluster.run(goes_on, 3, limits=SOON, on_report=stop)
    assert run.outcome == "timeout"
    assert "rank 2 was stopped by a signal and never went on" in run.explanation
    assert [row.state for row in evidence(run)][2] == "stopped"


def test_the_call_that_a_rank_waits_in_is_known_without_a_journal(
    cluster: Cluster,
) -> None:
    run = cluster.run(
        sleeps_while_others_wait,
        3,
        journal=False,
        last_call=True,
        limits=SOON,
    )
    assert run.outcome == "timeout"
    assert "rank 1 had not finished; rank 1 was at" in run.explanation
    assert run.ranks[0].journal == []
    rows = evidence(run)
    assert [row.state for row in rows] == ["waiting", "busy", "waiting"]
    assert rows[0].text.split() == ["call", "#3", "all_reduce"]
    assert rows[2].text.split()[:3] == ["call", "#3", "isend"]
    assert all("test_ddp_monitor.py:" in row.where for row in rows)


def test_reports_are_signs_of_life(cluster: Cluster) -> None:
    run = cluster.run(speaks_for_a_while, 2, limits=SOON)
    assert run.require_finished().values == ["done", "done"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--profile"], "--profile needs --monitor FOLDER"),
        (["--also", "tensorboard"], "--also needs --monitor FOLDER"),
        (
            ["--monitor", "new", "--also", "wandb"],
            "--also wandb: there are tensorboard",
        ),
        (["--monitor", "new", "--also", "prometheus:x"], "--also prometheus:x: there"),
        (["--monitor", "new", "--also", "prometheus:70000"], "at most 65535"),
        (["--monitor", "new", "--log-every-n-steps", "0"], "choose at least 1"),
        (["--hang-after", "0"], "--hang-after 0: choose a number of seconds"),
        (["--save", "no/such/model.pt"], "there is no folder"),
        (["--save", "."], "is a folder: name a file"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    course: Course, flags: list[str], sentence: str
) -> None:
    done = course.distlab("ddp", *flags)
    assert (done.code, done.out) == (2, "")
    assert sentence in done.err
    assert done.err.count("\n") == 1
    assert not (course.root / "new").exists()


def test_a_port_in_use_leaves_no_folder_behind(course: Course) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is missing")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        flags = ("--monitor", "new", "--also", f"prometheus:{port}")
        done = course.distlab("ddp", *flags)
    assert (done.code, done.out) == (11, "")
    assert f"port {port} on 127.0.0.1: Address already in use" in done.err
    assert not (course.root / "new").exists()


@pytest.mark.slow
def test_a_monitored_training(course: Course, tmp_path: Path) -> None:
    folder, model = tmp_path / "run", tmp_path / "model.pt"
    flags = ("--epochs", "2", "--monitor", str(folder), "--profile")
    done = course.distlab("ddp", *flags, "--save", str(model))
    assert (done.code, done.err) == (0, "")

    found = read_folder(folder)
    steps = [10, 20, 23, 30, 40, 46]
    assert {rank: [r.step for r in rows] for rank, rows in found.records.items()} == {
        0: steps,
        1: steps,
    }
    rows = [row for row in found.figures if "loss" in row]
    assert [row["step"] for row in rows] == steps
    for records in zip(*found.records.values(), strict=True):
        assert all(r.seconds >= r.data_wait_s + r.communication_s for r in records)
    validations = [row for row in found.figures if "validation_accuracy" in row]
    assert [row["step"] for row in validations] == [23, 46]
    assert f"{validations[-1]['validation_accuracy']:.4f} on held-out" in done.out

    state = torch.load(model, weights_only=True)
    weights = torch.cat([value.reshape(-1) for value in state.values()])
    assert f"{digest(weights)} on all 2 ranks" in done.out

    for rank in range(2):
        trace = json.loads((folder / f"profile/rank_{rank}.trace.json").read_text())
        names = {event.get("name", "") for event in trace["traceEvents"]}
        assert {f"ProfilerStep#{step}" for step in (3, 4, 5)} <= names
        assert "aten::addmm" in names

    shown = course.distlab("top", str(folder))
    assert (shown.code, shown.err) == (0, "")
    assert "epoch 2 of 2 · step 46" in shown.out
    again = course.distlab("ddp", "--monitor", str(folder))
    assert again.code == 2
    assert "holds the records of another run: choose a new folder" in again.err
    assert read_folder(folder) == found


def test_top_of_no_such_folder(course: Course) -> None:
    done = course.distlab("top", "nowhere")
    assert (done.code, done.out) == (2, "")
    assert done.err == "distlab: nowhere holds no records: there is no run.json\n"
