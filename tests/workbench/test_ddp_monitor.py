"""`distlab ddp --monitor`, `--save`, `--profile`, `--hang-after`, and `distlab top`."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from distlab.cli.app import app
from distlab.cli.ddp_monitor import MonitorOrder
from distlab.digests import digest
from distlab.monitor.jsonl import read_folder
from distlab.runner import Cluster, Limits, NotFinishedError
from distlab.runner.autopsy import evidence
from tests.workbench import idle
from tests.workbench.course import Course

NEW = MonitorOrder(folder=Path("new"))
SOON = Limits(seconds=60.0, idle_s=1.0)


@pytest.fixture
def course(tmp_path: Path) -> Course:
    return Course(tmp_path)


def test_a_run_in_which_no_rank_does_anything_is_ended(cluster: Cluster) -> None:
    run = cluster.run(idle.sleeps_on_rank_1, 3, limits=SOON)
    assert run.outcome == "timeout"
    assert run.idle_s >= 1.0
    assert re.match(
        r".*\b\d\.\d s: rank 1 .*rank 1 .*\bidle\.py:\d+",
        run.explanation,
    )
    with pytest.raises(NotFinishedError) as refused:
        run.require_finished()
    assert refused.value.run is run


def test_a_stopped_rank_is_named_though_it_waits_in_a_call(cluster: Cluster) -> None:
    def stop(rank: int, pid: int) -> None:
        if rank == 2:
            os.kill(pid, signal.SIGSTOP)

    run = cluster.run(idle.goes_on, 3, limits=SOON, on_report=stop)
    assert run.outcome == "timeout"
    assert "rank 2" in run.explanation
    assert [row.state for row in evidence(run)][2] == "stopped"


def test_the_call_that_a_rank_waits_in_is_known_without_a_journal(
    cluster: Cluster,
) -> None:
    run = cluster.run(
        idle.sleeps_while_others_wait,
        3,
        journal=False,
        last_call=True,
        limits=SOON,
    )
    assert run.outcome == "timeout"
    assert "rank 1" in run.explanation
    assert run.ranks[0].journal == []
    rows = evidence(run)
    assert [row.state for row in rows] == ["waiting", "busy", "waiting"]
    assert rows[0].text.split() == ["call", "#3", "all_reduce"]
    assert rows[2].text.split()[:3] == ["call", "#3", "isend"]
    assert all("idle.py:" in row.where for row in rows)


def test_reports_are_signs_of_life(cluster: Cluster) -> None:
    run = cluster.run(idle.speaks_for_a_while, 2, limits=SOON)
    assert run.require_finished().values == ["done", "done"]


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        (MonitorOrder(profile=True), "--profile needs --monitor FOLDER"),
        (MonitorOrder(log_every_n_steps=3), "--log-every-n-steps needs --monitor"),
        (MonitorOrder(also=("tensorboard",)), "--also needs --monitor FOLDER"),
        (replace(NEW, also=("wandb",)), "--also wandb: there are tensorboard"),
        (replace(NEW, also=("prometheus:x",)), "--also prometheus:x: there"),
        (replace(NEW, also=("prometheus:70000",)), "at most 65535"),
        (replace(NEW, log_every_n_steps=0), "choose at least 1"),
        (MonitorOrder(hang_after_s=0.0), "--hang-after 0: choose more than 0 seconds"),
    ],
)
def test_an_order_that_cannot_be_is_refused(order: MonitorOrder, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        order.check()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--monitor", "new", "--also", "wandb"], "--also wandb: there are"),
        (["--save", "no/such/model.pt"], "there is no folder"),
        pytest.param(["--save", "."], "is a folder: name", marks=pytest.mark.slow),
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
    assert f"port {port}" in done.err
    assert os.strerror(errno.EADDRINUSE) in done.err
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
    assert re.search(rf"{digest(weights)}.*\b2 ranks", done.out)

    for rank in range(2):
        trace = json.loads((folder / f"profile/rank_{rank}.trace.json").read_text())
        names = {event.get("name", "") for event in trace["traceEvents"]}
        assert {f"ProfilerStep#{step}" for step in (3, 4, 5)} <= names
        assert "aten::addmm" in names

    shown = CliRunner().invoke(app, ["top", str(folder)])
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert re.search(r"\b2 of 2\b.*\b46\b", shown.stdout)
    again = CliRunner().invoke(app, ["ddp", "--monitor", str(folder)])
    assert again.exit_code == 2
    assert again.stderr.startswith(f"distlab: {folder} ")
    assert read_folder(folder) == found


def test_top_of_no_such_folder(course: Course) -> None:
    done = course.distlab("top", "nowhere")
    assert (done.code, done.out) == (2, "")
    assert {"nowhere", "run.json"} <= set(done.err.split())
    assert done.err.count("\n") == 1
