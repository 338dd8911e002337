"""`distlab ddp` as a person meets it: codes, sentences, nothing left behind."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from distlab.cli.app import app
from distlab.runner import Cluster
from distlab.training.ddp_code import choose_units, whose
from tests.workbench.course import Course, filled, pristine
from tests.workbench.images import write_set
from tests.workbench.test_ddp import changed

STOPPED = "\nstopped; nothing is left running\n"


@pytest.fixture
def course(tmp_path: Path) -> Course:
    course = Course(tmp_path)
    for unit in ("trainer", "data_loader"):
        course.template(unit).write_text(pristine(unit), encoding="utf-8")
    return course


@pytest.fixture
def run(course: Course, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    """The command in this process, with ranks that are warm."""

    class Warm:
        def __init__(self, **_: object) -> None:
            pass

        def __enter__(self) -> Cluster:
            return cluster

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("distlab.runner.Cluster", Warm)
    monkeypatch.chdir(course.root)
    monkeypatch.setenv("DISTLAB_STATE", str(course.state))
    monkeypatch.setenv("DISTLAB_DATA", str(course.state / "data"))
    return CliRunner()


def test_plain_lines(run: CliRunner) -> None:
    done = run.invoke(app, ["ddp", "--epochs", "2", "--compare"])
    assert (done.exit_code, done.stderr) == (0, "")
    assert not set(done.stdout) & {"\r", "\x1b"}
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []
    for part in (
        "2 epochs, 46 steps",
        "  time      about ",
        " for its messages",
        "  cost      about 0.",
        "at 1.00 per worker and hour (--cost-per-worker-hour)",
        "rank       pid",
        "rank 0 logs: epoch 1  training loss",
        "2 processes: epoch 2 of 2",
        "on all 2 ranks: the same bits",
        "% of the ranks' time",
        "1 process ",
        "This is rounding",
        "sum-not-mean",
    ):
        assert part in done.stdout
    assert "rank 1 logs:" not in done.stdout


def test_json_is_one_object(run: CliRunner) -> None:
    flags = ["--epochs", "1", "-n", "3", "--batch-size", "20", "--lr", "0.1"]
    more = ["--lr-scaling", "linear", "--cost-per-worker-hour", "2", "--seed", "5"]
    done = run.invoke(app, ["ddp", "--json", *flags, *more])
    assert (done.exit_code, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert (data["world_size"], data["global_batch_size"]) == (3, 60)
    assert data["learning_rate"] == pytest.approx(0.3)
    assert data["seed"] == 5
    assert len(set(data["digests"])) == 1
    assert data["cost"] == pytest.approx(3 * data["seconds"] / 3600 * 2)
    assert len(data["shards"]) == 3
    assert (data["exit"], data["failures"], data["mlflow"]) == (0, [], None)


def test_numbers_that_are_none_are_null(run: CliRunner) -> None:
    done = run.invoke(app, ["ddp", "--json", "--epochs", "1", "--lr", "1e300"])
    data = json.loads(done.stdout, parse_constant=pytest.fail)
    assert data["epoch_rows"][0]["loss"] is None


def test_ones_own_files(run: CliRunner, tmp_path: Path) -> None:
    folder = write_set(tmp_path / "images")
    flags = ["--dataset", "idx", "--data-dir", str(folder), "--global-batch-size", "8"]
    done = run.invoke(app, ["ddp", *flags])
    assert (done.exit_code, done.stderr) == (0, "")
    assert " idx: " in done.stdout
    done = run.invoke(app, ["ddp", "--dataset", "mnist", "--data-dir", str(folder)])
    assert done.exit_code == 2
    assert "train-images-idx3-ubyte" in done.stderr


def test_ones_own_code(run: CliRunner, course: Course, tmp_path: Path) -> None:
    done = run.invoke(app, ["ddp", "--code", "mine"])
    assert done.exit_code == 2
    assert "1.5 trainer.broadcast_model, 1.6 " in done.stderr
    assert "1.10 data_loader.loader" in done.stderr
    assert "1.15" not in done.stderr  # nothing is resumed

    solutions = course.root / "solutions" / "phase1_data_parallel"
    for unit in ("trainer", "data_loader"):
        text = (solutions / f"{unit}.py").read_text(encoding="utf-8")
        course.template(unit).write_text(text, encoding="utf-8")
    done = run.invoke(app, ["ddp", "--code", "mine", "--epochs", "1"])
    assert (done.exit_code, done.stderr) == (0, "")
    assert "◆ " in done.stdout
    assert "  evaluate" not in done.stdout

    text = course.template("trainer").read_text(encoding="utf-8")
    head, _, tail = text.partition("    ### BEGIN SOLUTION trainer.evaluate\n")
    _, _, tail = tail.partition("    ### END SOLUTION\n")
    hole = '    raise NotImplementedError("trainer.evaluate")\n'
    course.template("trainer").write_text(head + hole + tail, encoding="utf-8")
    done = run.invoke(app, ["ddp", "--code", "mine", "--epochs", "1"])
    assert (done.exit_code, done.stderr) == (0, "")
    assert re.search(r"^  evaluate .* 1\.13$", done.stdout, re.MULTILINE)

    long = changed(tmp_path, 'log(f"epoch', 'log("ab " * 40 + "\\x1b" + f"epoch')
    done = run.invoke(app, ["ddp", "--code", long, "--epochs", "1"])
    (logged,) = [x for x in done.stdout.splitlines() if "rank 0 logs" in x]
    assert len(logged) == 80
    assert logged.endswith("…")

    own = changed(tmp_path, "    average_gradients(comm, model)\n", "")
    done = run.invoke(app, ["ddp", "--code", own, "--epochs", "1"])
    assert done.exit_code == 1
    assert "REPLICAS DIFFER" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    stuck = changed(
        tmp_path,
        "    optimizer.step()\n    mean_loss",
        "    if comm.rank:\n        comm.barrier()\n    mean_loss",
    )
    done = run.invoke(app, ["ddp", "--code", stuck, "--epochs", "1"])
    assert done.exit_code == 1
    assert "ranks 0 and 1 wait" in done.stderr


OWN_FIT = """
broadcast_model(comm, model)
model.train()
history = []
for epoch in range(num_epochs):
    train_loader.set_epoch(epoch)
    losses = [
        train_step(comm, model, optimizer, loss_fn, inputs, targets)
        for inputs, targets in train_loader
    ]
    history.append(sum(losses) / len(losses))
    if comm.rank == 0:
        log("by my own fit")
return history
"""


def test_without_code_it_is_what_use_says(run: CliRunner, course: Course) -> None:
    text = filled("trainer.fit", OWN_FIT, "trainer")
    course.template("trainer").write_text(text, encoding="utf-8")
    assert whose(choose_units(())) == ("reference",)  # it has not passed
    assert run.invoke(app, ["use", "mine", "1.11"]).exit_code == 0
    done = run.invoke(app, ["ddp", "--epochs", "1"])
    assert (done.exit_code, done.stderr) == (0, "")
    for part in (
        "  code      mine 1.11, reference 1.5 1.6 1.7 1.13 1.8 1.9 1.10\n",
        "rank 0 logs: by my own fit",
        "◆ The ranks ran your own 1.11.",
    ):
        assert part in done.stdout
    assert run.invoke(app, ["use", "reference", "trainer"]).exit_code == 0
    assert whose(choose_units(())) == ("reference",)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--batch-size 8 --global-batch-size 16", "give one of them"),
        ("--global-batch-size 1", "has not one for each of 2 ranks"),
        ("--epochs 0", "0 epochs: choose at least 1"),
        ("--dataset cifar", "choose digits, mnist, fashion-mnist or idx"),
        ("--dataset mnist", "get it with --download"),
        ("--track wandb", "choose mlflow"),
        ("--cost-per-worker-hour -1", "choose 0 or a larger number"),
        ("--cost-per-worker-hour nan", "choose 0 or a larger number"),
        ("--max-cost -1", "--max-cost -1: choose 0 or a larger number"),
        ("--epochs 1 --max-cost 0", "--max-cost 0: this run is expected"),
        ("--code mine --code reference", "choose one of them"),
        ("--code pyproject.toml", "pyproject.toml: line "),
        ("--code nowhere.py", "the file cannot be read"),
        ("--code solutions/phase1_data_parallel/collectives.py", "has neither fit nor"),
    ],
)
def test_contradictions_are_one_sentence(
    run: CliRunner, flags: str, sentence: str
) -> None:
    done = run.invoke(app, ["ddp", *flags.split()])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("distlab: ")
    assert done.stderr.count("\n") == 1
    assert sentence in done.stderr


@pytest.mark.slow
def test_ctrl_c_in_the_middle(course: Course) -> None:
    flags = ("--epochs", "100000")
    process = course.popen("-m", "distlab", "ddp", *flags, PYTHONUNBUFFERED="1")
    assert process.stdout
    for line in process.stdout:
        if "rank 0 logs: epoch 2" in line:
            break
    process.send_signal(signal.SIGINT)
    done = course.ended(process)
    assert (done.code, done.err) == (130, STOPPED)
